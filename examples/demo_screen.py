"""What the demo shows: one line a version, live on a terminal, one plain line a change elsewhere.

Owns no truth: the rows come from the exchange, the server's status and the answers over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .demo_client import Measurement

REFRESHES_PER_S = 4
BAR_CELLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One version as far as it is known; 0 is the base. `published_at_s` counts from the trainer's start."""

    number: int
    step: int
    published_at_s: float | None = None
    served_after_s: float | None = None
    pause_s: float | None = None
    measurement: Measurement | None = None
    note: str = ""

    @property
    def is_settled(self) -> bool:
        """Nothing more will be learned about it."""
        is_timed = self.number == 0 or self.pause_s is not None
        return bool(self.note) or (self.measurement is not None and is_timed)

    def cells(self, *, with_bar: bool) -> list[str]:
        shown = "" if self.measurement is None else self.measurement.shown
        if with_bar and self.measurement is not None and self.measurement.has_bar:
            shown += " " + "█" * round(BAR_CELLS * self.measurement.score)
        return [
            "base" if self.number == 0 else str(self.number),
            str(self.step),
            _number(self.published_at_s, "{:.1f} s"),
            _number(self.served_after_s, "{:.2f} s"),
            _number(self.pause_s, "{:.0f} ms", factor=1000),
            shown or self.note or "...",
        ]


def _number(value: float | None, form: str, *, factor: float = 1) -> str:
    return "" if value is None else form.format(value * factor)


class Screen:
    """Shows rows as they change; use as a context manager."""

    def __init__(self, headline: str, console: Console | None = None) -> None:
        self._headline, self._console = headline, console or Console()
        self._rows: tuple[Row, ...] = ()
        self._printed: set[int] = set()
        self._live: Live | None = None
        self._state = ""

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self, rows: Iterable[Row], state: str) -> None:
        """Show the rows as they are now; `state` is what the demo waits for."""
        self._rows, self._state = tuple(rows), state
        if self._console.is_terminal:
            self._refresh()
        else:
            self._print_settled()

    def finish(self, rows: Iterable[Row]) -> None:
        """The table that remains."""
        self._rows, self._state = tuple(rows), ""
        self._end_live()
        self._console.print(self._table(self._rows))

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=REFRESHES_PER_S, transient=True)
            self._live.start()
        self._live.update(self._table(self._rows))

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_settled(self) -> None:
        names = self._columns()
        for row in self._rows:
            if row.is_settled and row.number not in self._printed:
                self._printed.add(row.number)
                cells = zip(names, row.cells(with_bar=False), strict=True)
                self.say("  ".join(f"{name} {cell.strip()}" for name, cell in cells if cell))

    def _columns(self) -> list[str]:
        return ["version", "step", "published at", "served after", "pause", self._headline]

    def _table(self, rows: Iterable[Row]) -> Table:
        table = Table(caption=self._state or None, caption_justify="left")
        for name in self._columns():
            table.add_column(name, justify="left" if name == self._headline else "right")
        for row in rows:
            table.add_row(*row.cells(with_bar=True))
        return table
