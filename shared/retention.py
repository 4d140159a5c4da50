"""Which versions stay, and the deletion of the others in two phases.

First an entry of the log says what is retained from now on: no reader opens anything else. Then, after a
grace, what is neither retained nor leased nor pinned is deleted, its manifest first. A pruner that dies at
any point leaves work that the next one finishes. Deciding is `plan_retention`, pure; acting is `Pruner`.
Called by the writer after each commit and by `weightferry gc`. Follows docs/format.md [7].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .commit_log import LogEntry, Retention
from .errors import ConfigError
from .exchange import VERSIONS_NAME, Exchange
from .kill_points import reach
from .lease import LeaseWatch
from .manifest import MANIFEST_NAME
from .process import owner_name

GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What to keep besides the newest, the pinned and the leased versions.

    keep: so many of the newest versions; None keeps every version.
    keep_every: of the older ones, those whose step is a multiple of this; None keeps none of them.
    """

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep is {self.keep}; the newest version always stays, so give 1 or more")
        if self.keep_every is not None and (self.keep is None or self.keep_every < 1):
            raise ConfigError(
                f"keep_every is {self.keep_every} and keep is {self.keep}; keep_every must be 1 or more, and "
                "means something only beside keep: without keep nothing is ever deleted"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A version that retention has passed and that still waits, with the reason."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a pruner did, and what it could not do yet."""

    removed: tuple[int, ...] = ()
    held: tuple[Held, ...] = ()


def plan_retention(
    versions: Sequence[tuple[int, int]], policy: RetentionPolicy, pinned: Iterable[int]
) -> Retention | None:
    """What to retain of `versions`, (number, step) oldest first; None if that is all of them.

    `versions` must be what is retained now, or else something already given up would be retained again.
    """
    if policy.keep is None or len(versions) <= policy.keep:
        return None
    pinned, watermark = set(pinned), versions[-policy.keep][0]
    older = versions[: -policy.keep]
    kept = tuple(
        number
        for number, step in older
        if number in pinned or (policy.keep_every is not None and step % policy.keep_every == 0)
    )
    return None if len(kept) == len(older) else Retention(watermark=watermark, kept=kept)


class Pruner:
    """Applies a policy to an exchange, a step at a time; never waits by itself.

    Keep one pruner for as long as possible: leases are judged, and the grace is counted, by how long this
    very object has watched them.
    """

    def __init__(
        self,
        exchange: Exchange,
        policy: RetentionPolicy,
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exchange, self.policy, self.grace_s = exchange, policy, grace_s
        self._clock, self._leases = clock, LeaseWatch(exchange.store, clock)
        self._passed_since: dict[int, float] = {}

    def decide(self, number: int | None = None, step: int = 0) -> Retention | None:
        """What the policy would retain now, or once version `number` of `step` is there too."""
        log = self.exchange.log
        versions = [(entry.number, entry.step or 0) for entry in log.retained]
        if number is not None:
            versions.append((number, step))
        return plan_retention(versions, self.policy, log.pinned)

    def give_up(self) -> None:
        """Append an entry that retains what the policy says, if that is less than what is retained now."""

        def decide(_slot: int) -> dict[str, Any] | None:
            decided = self.decide()
            return None if decided is None else asdict(decided)

        log = self.exchange.log
        log.append_if(decide, kind="retention", run_id=log.reigning_run, owner=owner_name())
        reach("prune-given-up")

    def waiting(self) -> list[LogEntry]:
        """The versions that retention has passed and that are still there, wholly or in part."""
        log = self.exchange.log
        log.absorb()
        there = set(self.exchange.store.list(VERSIONS_NAME))
        return [
            entry
            for entry in log.versions
            if not log.retention.keeps(entry.number) and _directory_name(entry) in there
        ]

    def leased(self, numbers: Iterable[int]) -> list[Held]:
        """Those of some versions that live readers hold."""
        leases = self._leases.look()
        readers = {number: leases.holders_of(number) for number in numbers}
        return [
            Held(number=number, reason=f"leased by {', '.join(sorted(names))}")
            for number, names in readers.items()
            if names
        ]

    def advance(self) -> PruneReport:
        """Delete what retention has passed, the grace is over for, and nobody holds."""
        now, waiting = self._clock(), self.waiting()
        # The leases are listed after the log was read: whoever wrote one later has read the log later too.
        held = {held.number: held for held in self.leased(entry.number for entry in waiting)}
        self._passed_since = {e.number: self._passed_since.get(e.number, now) for e in waiting}
        for number, since in self._passed_since.items():
            if now - since < self.grace_s and number not in held:
                held[number] = Held(number=number, reason=f"in its grace of {self.grace_s:g} s")
        free = [entry for entry in waiting if entry.number not in held]
        for entry in free:
            self._remove(entry)
        return PruneReport(removed=tuple(entry.number for entry in free), held=tuple(held.values()))

    def _remove(self, entry: LogEntry) -> None:
        reach("prune-before-delete")
        self.exchange.store.remove_tree(
            f"{VERSIONS_NAME}/{_directory_name(entry)}",
            first=MANIFEST_NAME,
            after_first=lambda: reach("prune-mid-delete"),
        )
        reach("prune-after-delete")


def _directory_name(entry: LogEntry) -> str:
    return (entry.dir or "").removeprefix(f"{VERSIONS_NAME}/")
