"""A small training job for tests: a tiny base, rows to learn, and the trainer as people start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_trainer import run_forked_trainer

RUN_DEADLINE_S = 120.0

SETTINGS = """\
base = {base}
exchange = {exchange}
output_dir = {output}
seed = 3

[data]
path = {rows}
max_length = 32
batch_size = 8

[lora]
r = 8
lora_alpha = 16
target_modules = "all-linear"

[optimizer]
lr = 0.01

[schedule]
num_steps = 12

[publish]
every = 5
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """The files of one job below `directory`."""

    directory: Path
    base: Path

    @property
    def settings(self) -> Path:
        return self.directory / "settings.toml"

    @property
    def exchange(self) -> Path:
        return self.directory / "exchange"

    @property
    def rows(self) -> Path:
        return self.directory / "rows.jsonl"

    def write(self) -> TrainerJob:
        """Settings and 32 rows."""
        rows = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(32)]
        write_rows(self.rows, rows)
        places = {"base": self.base, "exchange": self.exchange, "rows": self.rows}
        places["output"] = self.directory / "output"
        self.settings.write_text(
            SETTINGS.format(**{name: json.dumps(str(path)) for name, path in places.items()})
        )
        return self

    def command(self, *overrides: str, num_ranks: int | None = None) -> list[str]:
        """Under torchrun, or without it where `num_ranks` is not given."""
        flags = [word for override in overrides for word in ("--set", override)]
        start = [sys.executable, "-m", "weightferry.trainer"]
        if num_ranks is not None:
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
            start = [sys.executable, "-m", *launcher, *start[1:]]
        return [*start, str(self.settings), *flags]

    def run(
        self, *overrides: str, num_ranks: int | None = None, kill_at: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """To its end, by the cheap way; see `forked_trainer`."""
        _, _, _, *arguments = self.command(*overrides)
        return run_forked_trainer(arguments, num_ranks=num_ranks, kill_at=kill_at, deadline_s=RUN_DEADLINE_S)

    def launch(
        self, *overrides: str, num_ranks: int | None = None, kill_at: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """To its end, as people start it."""
        return run_trainer(self.command(*overrides, num_ranks=num_ranks), kill_at=kill_at)

    @contextmanager
    def started(self, *overrides: str, num_ranks: int | None = None) -> Iterator[subprocess.Popen[str]]:
        """The running job; killed on the way out, ranks included, if it still runs then."""
        process = subprocess.Popen(
            self.command(*overrides, num_ranks=num_ranks),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            for pid in [*children_of(process.pid), process.pid] if process.poll() is None else []:
                os.kill(pid, 9)
            process.communicate()

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "output" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]


def run_trainer(command: Sequence[str], *, kill_at: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"WEIGHTFERRY_TEST_KILL_AT": kill_at}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=RUN_DEADLINE_S, check=False
    )


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, in that order (Linux)."""
    return [
        int(child)
        for children in Path(f"/proc/{pid}/task").glob("*/children")
        for child in children.read_text().split()
    ]


def wait_for(is_so: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come within {deadline_s:.0f} s"
        time.sleep(0.05)
