"""Follows one demo run: what was published, what the server applied, and what each version answers.

Invariants: a row's measurement is of the version that every single response named; a version that the server
passed over is said to be so, never dropped. Reads the exchange, the server's status and its answers; decides
nothing about either job.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from ..shared.errors import ExchangeNotFoundError, WeightferryError
from ..shared.exchange import Exchange, Version
from .demo_client import Measurement, PolicyClient
from .demo_screen import Row

SKIPPED = "skipped: a newer version was there first"
REPLACED = "served, and replaced before it was asked"


class Task(Protocol):
    """What the policy is taught, and how it is asked."""

    @property
    def headline(self) -> str:
        """What a measurement shows, in one or two words."""
        ...

    @property
    def introduction(self) -> str:
        """What is asked, in one line."""
        ...

    def write_rows(self, path: Path) -> None:
        """Write the trainer's JSONL file."""
        ...

    def measure(self, client: PolicyClient) -> Measurement | None:
        """Ask the server; None if its answers were not all of one version."""
        ...

    def objection(self, base: Measurement, last: Measurement) -> str | None:
        """Why the last version does not count as taught, or None."""
        ...


@dataclass(slots=True)
class Story:
    """The rows of one run, by version number; 0 is the base."""

    exchange_path: Path
    client: PolicyClient
    task: Task
    started: float = field(default_factory=time.time)
    rows: dict[int, Row] = field(default_factory=lambda: {0: Row(number=0, step=0)})
    status: dict[str, Any] = field(default_factory=dict)

    def measure_base(self) -> None:
        """Ask the server before the trainer exists: the version must be 0."""
        measurement = self.task.measure(self.client)
        if measurement is None or measurement.version != 0:
            raise WeightferryError(
                f"the server answered before any publication, but not as version 0: {measurement}"
            )
        self.rows[0] = replace(self.rows[0], measurement=measurement)

    def look(self) -> None:
        """Read the exchange and the server's status once, then ask a version that was not asked yet."""
        self.status = self.client.status() or self.status
        versions = self._versions()  # after the status, so that the active version is among them
        applied = {entry["number"]: entry for entry in self.status.get("applied", ())}
        for version in versions:
            row = self.rows.get(version.number) or self._first_row(version)
            self.rows[version.number] = self._with_apply(row, applied.get(version.number))
        if self.active_row().measurement is None:
            self._measure()

    def active_row(self) -> Row:
        """The row of the version that answers now."""
        number = self.status.get("active_version", 0)
        if number not in self.rows:
            raise WeightferryError(
                f"the server says that version {number} is active; {self.exchange_path} has none"
            )
        return self.rows[number]

    def newest_row(self) -> Row:
        return self.rows[max(self.rows)]

    def ordered(self) -> list[Row]:
        return [self.rows[number] for number in sorted(self.rows)]

    def refusal(self, number: int) -> str | None:
        """Why the server refuses a version, or None."""
        reasons = [entry["reason"] for entry in self.status.get("refused", ()) if entry["number"] == number]
        return reasons[-1] if reasons else None

    def _versions(self) -> list[Version]:
        try:
            return Exchange.open(self.exchange_path).versions()
        except ExchangeNotFoundError:
            return []  # neither job has made it yet

    def _first_row(self, version: Version) -> Row:
        published = datetime.fromisoformat(version.entry.created).timestamp()
        return Row(number=version.number, step=version.step, published_at_s=published - self.started)

    def _with_apply(self, row: Row, applied: dict[str, Any] | None) -> Row:
        active = self.status.get("active_version", 0)
        if applied is not None:
            row = replace(row, served_after_s=applied["published_to_served_s"], pause_s=applied["pause_s"])
        if row.note or row.measurement is not None or row.number >= active:
            return row
        return replace(row, note=REPLACED if applied is not None else self.refusal(row.number) or SKIPPED)

    def _measure(self) -> None:
        measurement = self.task.measure(self.client)
        if measurement is None:
            return  # the server moved on; the next look finds the newer version
        row = self.rows.get(measurement.version)
        if row is not None:
            self.rows[measurement.version] = replace(row, measurement=measurement, note="")
