"""The version that a client asks for: the request headers, what satisfies them, and what is said otherwise.

`x-weightferry-version: N` asks for exactly N, `x-weightferry-min-version: N` for N or a newer one; 0 is the
base. Both may be given. An answer satisfies them only if every version that may have made a part of it does.
Used by the middleware alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..shared.errors import UsageError

EXACT_HEADER = b"x-weightferry-version"
MINIMUM_HEADER = b"x-weightferry-min-version"
MAX_DIGITS = 18  # of what fits 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedVersion:
    """What one request asks for; None where it does not care."""

    exact: int | None = None
    minimum: int | None = None

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> WantedVersion:
        """From a request's headers, names in lower case; UsageError says what stands in place of a number."""
        found: dict[bytes, list[bytes]] = {EXACT_HEADER: [], MINIMUM_HEADER: []}
        for name, value in headers:
            if name in found:
                found[name].append(value.strip())
        return cls(
            exact=_number(EXACT_HEADER, found[EXACT_HEADER]),
            minimum=_number(MINIMUM_HEADER, found[MINIMUM_HEADER]),
        )

    @property
    def is_any(self) -> bool:
        return self.exact is None and self.minimum is None

    def is_met_by(self, versions: Iterable[int]) -> bool:
        """Whether an answer to which these versions may have contributed is one that was asked for."""
        return all(
            (self.exact is None or version == self.exact)
            and (self.minimum is None or version >= self.minimum)
            for version in versions
        )

    def to_json(self) -> dict[str, int]:
        wanted = {"version": self.exact, "min_version": self.minimum}
        return {name: number for name, number in wanted.items() if number is not None}

    def __str__(self) -> str:
        words = [] if self.exact is None else [f"version {self.exact}"]
        words += [] if self.minimum is None else [f"version {self.minimum} or a newer one"]
        return " and ".join(words)


def _number(name: bytes, values: list[bytes]) -> int | None:
    if not values:
        return None
    value = b", ".join(values)  # as HTTP joins a header that is given twice
    if not value.isdigit() or len(value) > MAX_DIGITS:
        found = value.decode("latin-1")[:100]
        raise UsageError(
            f"the header {name.decode()} is {found!r}: expected a version's number, an integer of 0 or more"
        )
    return int(value)
