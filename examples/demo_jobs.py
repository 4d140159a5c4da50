"""The demo's two jobs as processes: the rollout server and the trainer's torchrun.

Invariant: a job that was started here is ended here, with its descendants, and nothing else is signalled.
torchrun gives each rank a session of its own (torch 2.13, elastic/multiprocessing/subprocess_handler), so a
process group would miss the ranks: the first process is asked to end, and gets the time to end its own
children; only then are it and its descendants killed, by their ids. Each job writes to a log file; an error
about a job shows the end of its log and where the rest is.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..shared.errors import UsageError, WeightferryError

# torchrun gives its ranks 30 s after SIGTERM, then kills them itself; it must not be killed before that.
STOP_DEADLINE_S = 75.0
KILL_DEADLINE_S = 10.0
POLL_S = 0.1
LOG_TAIL_LINES = 15
# How both jobs begin the one line that says why they ended; torchrun adds thirty lines after it.
OWN_ERROR = re.compile(r"weightferry[a-z ]*: ")


class Job:
    """One job with a log file; use as a context manager, which ends it."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends both jobs in order
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def require_running_or_done(self) -> None:
        """Raise if it ended with an error."""
        if self.exit_code() not in (None, 0):
            raise self.failure(f"ended with exit code {self.exit_code()}")

    def wait_until(self, is_ready: Callable[[], bool], *, what: str, deadline_s: float) -> None:
        """Wait for a condition while the job lives; raise when it ends first or the deadline passes."""
        deadline = time.monotonic() + deadline_s
        while not is_ready():
            if self.exit_code() is not None:
                raise self.failure(f"ended with exit code {self.exit_code()} before {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"{what} did not happen within {deadline_s:.0f} s")
            time.sleep(POLL_S)

    def failure(self, problem: str) -> WeightferryError:
        """An error that shows what the job itself gave as its reason, or else the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        reasons = [line for line in lines if OWN_ERROR.match(line)]
        shown = "\n".join(f"  | {line}" for line in reasons or lines[-LOG_TAIL_LINES:])
        kind = UsageError if self.exit_code() == UsageError.exit_code else WeightferryError
        return kind(f"the {self.name} {problem}. It says:\n{shown}\n  whole log: {self.log}")

    def stop(self) -> None:
        """End it: SIGTERM; after the deadline or a second Ctrl-C, SIGKILL to it and its descendants."""
        if self.exit_code() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for pid in (*_descendants(self._process.pid), self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(KILL_DEADLINE_S)


def _descendants(pid: int) -> list[int]:
    """Processes below `pid` at this moment, deepest last (Linux: /proc/PID/task/TID/children)."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How the rollout server is started."""

    base: Path
    exchange: Path
    cache: Path
    apply: str
    port: int
    log: Path
    max_model_len: int
    kv_cache_bytes: int
    max_lora_rank: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        # fmt: off
        command = [
            sys.executable, "-m", "weightferry.shared.command", "serve", str(self.base),
            "--exchange", str(self.exchange), "--apply", self.apply, "--port", str(self.port),
            "--cache-dir", str(self.cache),
            "--max-model-len", str(self.max_model_len), "--kv-cache-memory-bytes", str(self.kv_cache_bytes),
            "--enforce-eager", "--disable-uvicorn-access-log",
        ]
        # fmt: on
        return [*command, "--max-lora-rank", str(self.max_lora_rank)] if self.apply == "adapter" else command

    def environment(self) -> dict[str, str]:
        """A quick start on a small machine: no compilation, one process less, one thread."""
        return {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self) -> Job:
        return Job("server", self.command(), log=self.log, environment=self.environment())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """How the trainer is started: a settings file under torchrun."""

    settings: Path
    log: Path
    num_ranks: int

    def command(self) -> list[str]:
        # fmt: off
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(self.num_ranks), "-m", "weightferry.trainer", str(self.settings),
        ]
        # fmt: on

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def start(self) -> Job:
        return Job("trainer", self.command(), log=self.log, environment=self.environment())


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
