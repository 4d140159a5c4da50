"""What a job tells while it runs: one JSON line for each step and publication, and a bar for people.

`metrics.jsonl` is appended to and written through line by line: it can be followed, and a job that dies keeps
what it told. A restarted job goes on below. Only rank 0 has a reporter that writes; the others' stay silent.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from ..shared.errors import ConfigError

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. `loss` is the mean over the step's `loss_tokens`, of all ranks together."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    loss_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """One publication; `bytes` are those that the version does not share with the base."""

    step: int
    version: int
    run_id: str
    seconds: float
    bytes: int


class Reporter:
    """Writes a job's metrics below `output_dir`, or nothing where that is None; use as a context manager."""

    def __init__(self, output_dir: Path | None, num_steps: int) -> None:
        self._file = None if output_dir is None else open_for_append(output_dir / METRICS_NAME)
        # disable=None: no bar where stderr is a file
        self._bar = tqdm(total=num_steps, unit="step", disable=True if output_dir is None else None)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """A line for people, above the bar."""
        if self._file is not None:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def step(self, report: StepReport) -> None:
        self._record("step", asdict(report) | {"tokens_per_s": report.tokens_per_s})
        self._bar.set_postfix_str(f"loss {report.loss:.4f}", refresh=False)
        self._bar.update()

    def published(self, report: PublishReport) -> None:
        self._record("publish", asdict(report))
        size = f"{report.bytes / 1e6:,.1f} MB"
        self.say(f"published version {report.version} (step {report.step}, {size}, {report.seconds:.1f} s)")

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")


def open_for_append(path: Path) -> Any:
    """A text file that is written through at each line's end."""
    try:
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ConfigError(f"output_dir: {path} cannot be written: {error.strerror}") from None
