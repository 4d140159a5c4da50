"""The commit log: dense, numbered entries, each created exclusively; the truth about what is in an exchange.

Invariants: slot n+1 exists only if slot n does; an entry never changes; epochs only rise; a version entry
carries the epoch that reigned when it was appended; a version that an entry no longer retains is never
retained again, because every entry is made from its predecessor. Neither locks nor clocks are trusted: a
writer whose epoch has passed finds its slot taken, reads the newer epoch, and stops.
Follows docs/format.md [5] and [7].
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from .digest import canonical_json, xxh3_128
from .errors import FormatError, IntegrityError, WriterFencedError
from .manifest import FORMAT, check_format, check_path, read_json_object
from .store import Store

LOG_NAME = "log"
KINDS = ("epoch", "version", "retention", "pin", "unpin")
MANY_ENTRIES, ENTRIES_AT_ONCE = 32, 16
TAKEN_SLOT_DEADLINE_S = 60.0
_PAUSE_S = 0.05
_DIGITS = 12
_RESTORE = "restore the file from a copy, or start a new exchange: this one cannot be trusted without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which versions stay: those at or above the watermark, and those named. The others may be deleted."""

    watermark: int = 0
    kept: tuple[int, ...] = ()

    def keeps(self, number: int) -> bool:
        return number >= self.watermark or number in self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One slot. Its kind: a writer took over ("epoch"), a publication was committed ("version"), version
    `target` is to stay for good ("pin") or no more ("unpin"), or "retention" alone.

    A version or retention entry may carry `watermark` and `kept`: from this slot on only these are retained.
    """

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
    target: int | None = None
    watermark: int | None = None
    kept: tuple[int, ...] | None = None
    xxh3_128: str | None = None
    format: int = FORMAT

    @property
    def retention(self) -> Retention | None:
        return None if self.watermark is None else Retention(watermark=self.watermark, kept=self.kept or ())

    @property
    def digest(self) -> str:
        """What `xxh3_128` must be: that of the canonical bytes without it."""
        return xxh3_128(canonical_json(asdict(self) | {"xxh3_128": None}))

    def to_bytes(self) -> bytes:
        return canonical_json(asdict(self) | {"xxh3_128": self.digest})

    @classmethod
    def from_bytes(cls, data: bytes, where: object) -> LogEntry:
        """Parse and check an entry; `where` is its full name, of which the last part must be its slot's."""
        value = read_json_object(data, where)
        check_format(value, where)
        try:
            kept = value.get("kept")
            fields: dict[str, Any] = value | {"kept": None if kept is None else tuple(kept)}
            entry = cls(**fields)
            slot = slot_name(entry.number)
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"{where} is not a log entry of format {FORMAT} ({error}); {_RESTORE}"
            ) from None
        if entry.kind not in KINDS or slot != str(where).rpartition("/")[2]:
            raise FormatError(
                f"{where} says kind {entry.kind!r}, number {entry.number}, not what its name promises; "
                f"{_RESTORE}"
            )
        if entry.xxh3_128 != entry.digest:
            raise IntegrityError(
                where, "has other bytes", expected=entry.xxh3_128, found=entry.digest, action=_RESTORE
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


Decide = Callable[[int], dict[str, Any] | None]
_REIGNING = 0  # epochs count from 1


class CommitLog:
    """The log of one exchange, with what this process has read of it so far; threads may share it."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.RLock()
        self.entries: list[LogEntry] = []
        self.retention = Retention()
        self.pinned: frozenset[int] = frozenset()

    @property
    def highest_epoch(self) -> int:
        return max((entry.epoch for entry in self.entries), default=0)

    @property
    def versions(self) -> list[LogEntry]:
        """Every version ever committed, also what retention has passed."""
        return [entry for entry in self.entries if entry.kind == "version"]

    @property
    def retained(self) -> list[LogEntry]:
        """The versions that may be opened."""
        return [entry for entry in self.versions if self.retention.keeps(entry.number)]

    def absorb(self) -> None:
        """Read every entry after the last one known, in order, up to the first free slot."""
        with self._lock:
            if not self.entries:
                self._absorb_at_once()
            while (entry := self._read(len(self.entries) + 1)) is not None:
                self._enter(entry)

    def _absorb_at_once(self) -> None:
        """Read a long log for the first time, many entries at a time; a far store takes its time for each."""
        num_listed = len(self._store.list(LOG_NAME))
        if num_listed < MANY_ENTRIES:
            return
        with ThreadPoolExecutor(ENTRIES_AT_ONCE, thread_name_prefix="read log") as pool:
            for entry in pool.map(self._read, range(1, num_listed + 1)):
                if entry is None:
                    return  # a gap: `require_dense` and verification say so
                self._enter(entry)

    @property
    def reigning_run(self) -> str:
        """The run id of the newest epoch, "" if there is none yet."""
        return next((entry.run_id for entry in reversed(self.entries) if entry.kind == "epoch"), "")

    def require_dense(self) -> None:
        """Raise IntegrityError if entries lie beyond a missing one: then nothing may be appended."""
        self.absorb()
        missing = slot_name(len(self.entries) + 1)
        beyond = [name for name in self._store.list(LOG_NAME) if name > missing]
        if beyond and self._store.read(f"{LOG_NAME}/{missing}") is None:
            where = self._store.where(f"{LOG_NAME}/{missing}")
            raise IntegrityError(
                where,
                f"is missing, yet {beyond[-1]} is there",
                action="restore it, or give this job another exchange",
            )

    def append(
        self, *, kind: str, epoch: int | None, decide: Decide | None = None, **fields: Any
    ) -> LogEntry:
        """Append an entry durably in the next free slot and return it.

        `epoch=None` opens a new epoch, one above the highest. Otherwise WriterFencedError if the log
        already holds a newer epoch than the given one. `decide(number)` may add fields; see `append_if`.
        """
        entry = self._append(decide or (lambda _: {}), kind=kind, epoch=epoch, **fields)
        if entry is None:
            raise ValueError(f"nothing was decided for an entry of kind {kind}")
        return entry

    def append_if(self, decide: Decide, *, kind: str, **fields: Any) -> LogEntry | None:
        """Append an entry in whatever epoch reigns: for those who are not the writer.

        `decide(number)` is asked once every entry before slot `number` is known, and again if another
        process takes that slot; it returns further fields, or None when there is nothing to append.
        """
        return self._append(decide, kind=kind, epoch=_REIGNING, **fields)

    def _append(self, decide: Decide, *, kind: str, epoch: int | None, **fields: Any) -> LogEntry | None:
        nonce, tried = uuid.uuid4().hex, (0, 0.0)
        with self._lock:
            while True:
                self.absorb()
                if epoch and self.highest_epoch > epoch:
                    raise WriterFencedError(self._fenced_message(epoch))
                number = len(self.entries) + 1
                tried = self._require_progress(number, tried)
                decided = decide(number)
                if decided is None:
                    return None
                reign = self.highest_epoch + 1 if epoch is None else epoch or self.highest_epoch
                entry = LogEntry(
                    kind=kind, number=number, epoch=reign, nonce=nonce, created=now(), **fields, **decided
                )
                try:
                    self._store.create(f"{LOG_NAME}/{slot_name(number)}", entry.to_bytes())
                except FileExistsError:
                    continue  # another process has this slot: read it, look at its epoch, try the next
                self._enter(entry)
                return entry

    def _require_progress(self, number: int, tried: tuple[int, float]) -> tuple[int, float]:
        """A slot that is taken must be readable soon; (slot, when it was first tried) is carried along."""
        if tried[0] != number:
            return number, time.monotonic()
        if time.monotonic() - tried[1] > TAKEN_SLOT_DEADLINE_S:
            raise IntegrityError(
                self._store.where(f"{LOG_NAME}/{slot_name(number)}"),
                f"is taken, yet cannot be read for {TAKEN_SLOT_DEADLINE_S:g} s",
                action="see whether this file system or bucket answers everybody alike, then start again",
            )
        time.sleep(_PAUSE_S)
        return tried

    def _enter(self, entry: LogEntry) -> None:
        self.entries.append(entry)
        self.retention = entry.retention or self.retention
        if entry.kind == "pin":
            self.pinned |= {entry.target or 0}
        elif entry.kind == "unpin":
            self.pinned -= {entry.target or 0}

    def _read(self, number: int) -> LogEntry | None:
        path = f"{LOG_NAME}/{slot_name(number)}"
        data = self._store.read(path)
        return None if data is None else LogEntry.from_bytes(data, self._store.where(path))

    def _fenced_message(self, epoch: int) -> str:
        newer = next(entry for entry in self.entries if entry.epoch > epoch)
        return (
            f"{self._store.where('')}: the writer of epoch {epoch} was replaced by {newer.owner} (epoch "
            f"{newer.epoch}, run {newer.run_id}, since {newer.created}); this job must stop, nothing of it "
            "was committed"
        )
