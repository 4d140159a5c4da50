"""The commit log: dense, numbered entries, each created exclusively; the truth about epochs and versions.

Invariants: slot n+1 exists only if slot n does; an entry never changes; epochs only rise; a version entry
carries the epoch that reigned when it was appended. Neither locks nor clocks are trusted: a writer whose
epoch has passed finds its slot taken, reads the newer epoch, and stops. Follows docs/format.md [5].
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import durable
from .digest import canonical_json
from .errors import FormatError, WriterFencedError
from .manifest import FORMAT, check_format, check_path, read_json_object

LOG_NAME = "log"
_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One slot: kind "epoch" (a writer took over) or "version" (a publication was committed)."""

    kind: str
    number: int
    epoch: int
    run_id: str
    nonce: str
    owner: str
    created: str
    dir: str | None = None
    step: int | None = None
    manifest_sha256: str | None = None
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return canonical_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> LogEntry:
        value = read_json_object(data, where)
        check_format(value, where)
        try:
            entry = cls(**value)
        except TypeError as error:
            raise FormatError(f"{where} is not a log entry of format {FORMAT}: {error}") from None
        if entry.kind not in ("epoch", "version") or slot_name(entry.number) != where.name:
            raise FormatError(
                f"{where} says kind {entry.kind!r}, number {entry.number}: not what its name promises"
            )
        if entry.kind == "version":
            check_path(entry.dir)
        return entry


def slot_name(number: int) -> str:
    """The file name of a slot; 42 is `000000000042.json`."""
    return f"{number:0{_DIGITS}d}.json"


def now() -> str:
    """The wall-clock time for people to read; nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class CommitLog:
    """The log directory of one exchange, with what this process has read of it so far."""

    def __init__(self, exchange_path: Path) -> None:
        self.path = exchange_path / LOG_NAME
        self.entries: list[LogEntry] = []

    @property
    def highest_epoch(self) -> int:
        return max((entry.epoch for entry in self.entries), default=0)

    @property
    def versions(self) -> list[LogEntry]:
        return [entry for entry in self.entries if entry.kind == "version"]

    def absorb(self) -> None:
        """Read every entry after the last one known, in order, up to the first free slot."""
        while True:
            entry = self._read(len(self.entries) + 1)
            if entry is None:
                return
            self.entries.append(entry)

    def append(self, *, kind: str, epoch: int | None, run_id: str, owner: str, **version: Any) -> LogEntry:
        """Append an entry durably in the next free slot and return it.

        `epoch=None` opens a new epoch, one above the highest. Otherwise WriterFencedError if the log
        already holds a newer epoch than the given one.
        """
        nonce = uuid.uuid4().hex
        while True:
            self.absorb()
            if epoch is not None and self.highest_epoch > epoch:
                raise WriterFencedError(self._fenced_message(epoch))
            entry = LogEntry(
                kind=kind,
                number=len(self.entries) + 1,
                epoch=self.highest_epoch + 1 if epoch is None else epoch,
                run_id=run_id,
                nonce=nonce,
                owner=owner,
                created=now(),
                **version,
            )
            try:
                durable.create_exclusive(self.path / slot_name(entry.number), entry.to_bytes())
            except FileExistsError:
                continue  # another writer has this slot: read it, look at its epoch, try the next
            self.entries.append(entry)
            return entry

    def _read(self, number: int) -> LogEntry | None:
        path = self.path / slot_name(number)
        data = durable.read_fresh(path)
        return None if data is None else LogEntry.from_bytes(data, path)

    def _fenced_message(self, epoch: int) -> str:
        newer = next(entry for entry in self.entries if entry.epoch > epoch)
        return (
            f"{self.path.parent}: the writer of epoch {epoch} was replaced by {newer.owner} (epoch "
            f"{newer.epoch}, run {newer.run_id}, since {newer.created}); this job must stop, nothing of it "
            "was committed"
        )
