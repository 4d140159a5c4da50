"""A reader's lease: written before it reads a version, so that retention leaves that version alone.

One file a lease under `readers/`, with a beat; gone when released. The order is what makes it safe: the
reader writes its lease, then reads the log and gives the lease back if the version is no longer retained; a
pruner appends to the log, then lists the leases. Whoever comes second sees the other.
`LeaseWatch` is the pruner's side: which leases live, by its own clock. Follows docs/format.md [7].
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .beat import Beat
from .errors import ConfigError, FormatError, VersionNotFoundError
from .manifest import FORMAT, check_format, read_json_object
from .process import is_gone_from_this_host, process_identity
from .store import Store

READERS_NAME = "readers"
LEASE_TTL_S = 30.0


class Lease:
    """Holds one version of an exchange open for one reader, as a context manager.

    `is_retained` reads the log past every cache and says whether the version may still be opened.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        reader: str,
        is_retained: Callable[[], bool],
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        self._store, self.number, self._ttl_s, self._is_retained = store, number, ttl_s, is_retained
        self.reader = f"{re.sub(r'[^A-Za-z0-9._-]', '-', reader)}-{uuid.uuid4().hex[:8]}"
        self.path = f"{READERS_NAME}/{self.reader}.json"

    def __enter__(self) -> Lease:
        try:
            self._beat = Beat(self._store, self.path, self._content, self._ttl_s)
        except PermissionError as error:
            raise ConfigError(
                f"{self._store.where(READERS_NAME)}: a reader must leave its lease here, or its version "
                f"could be deleted meanwhile; this user may not: let its group write (chmod g+w): {error}"
            ) from None
        try:
            retained = self._is_retained()
        except BaseException:
            self._release()
            raise
        if not retained:
            self._release()
            raise VersionNotFoundError(
                self.number, f"version {self.number} is below the retention watermark; open a newer one"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        self._beat.close()
        self._store.remove(self.path)

    def _content(self, beat: int) -> dict[str, object]:
        return {
            "format": FORMAT,
            "reader": self.reader,
            "process": process_identity(),
            "numbers": [self.number],
            "beat": beat,
            "ttl_s": self._ttl_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """A lease file as last seen, and since when it has had these bytes, by the watcher's clock."""

    data: bytes
    since: float


class LeaseWatch:
    """Tells live leases from dead ones: a lease is dead once its bytes stood still for its ttl.

    One that is seen for the first time lives, unless its process is gone from this same host. A file that
    cannot be read as a lease holds every version until it has stood still for `LEASE_TTL_S`.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._seen: dict[str, _Sight] = {}

    def look(self) -> LeasesSeen:
        """List the leases now; the files of dead ones are removed."""
        now, seen, holders, everything = self._clock(), {}, {}, []
        for name in self._store.list(READERS_NAME):
            path = f"{READERS_NAME}/{name}"
            data = self._store.read(path)
            if data is None:
                continue  # given back meanwhile
            before = self._seen.get(name)
            sight = before if before and before.data == data else _Sight(data=data, since=now)
            lease = _parse(data, path)
            if now - sight.since >= lease.ttl_s or is_gone_from_this_host(lease.process):
                self._store.remove(path)
                continue
            seen[name] = sight
            for number in lease.numbers or ():
                holders.setdefault(number, []).append(lease.reader)
            if lease.numbers is None:
                everything.append(lease.reader)
        self._seen = seen
        return LeasesSeen(holders=holders, everything=tuple(everything))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesSeen:
    """Who holds what: reader names by version number, and those that must be taken to hold everything."""

    holders: dict[int, list[str]]
    everything: tuple[str, ...]

    def holders_of(self, number: int) -> tuple[str, ...]:
        return (*self.holders.get(number, ()), *self.everything)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeaseContent:
    reader: str
    numbers: tuple[int, ...] | None
    ttl_s: float
    process: object = None


def _parse(data: bytes, path: str) -> _LeaseContent:
    try:
        value = read_json_object(data, path)
        check_format(value, path)
        numbers, ttl_s = tuple(int(number) for number in value["numbers"]), float(value["ttl_s"])
        return _LeaseContent(
            reader=str(value["reader"]), numbers=numbers, ttl_s=ttl_s, process=value.get("process")
        )
    except (FormatError, KeyError, TypeError, ValueError):
        return _LeaseContent(reader=path, numbers=None, ttl_s=LEASE_TTL_S)
