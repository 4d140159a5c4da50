"""How an apply of merged weights stops the engine, by the operator's policy.

`keep` freezes running requests, which go on under the new weights; `wait` lets them end under the old ones
while new ones wait; `abort` ends them at once. Invariant: a pause touches no weights, so that after one which
failed it is enough to resume. Called by the applier, inside `state.replacing`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..shared.errors import EngineBusyError

if TYPE_CHECKING:
    from .engine import Engine
    from .state import ServerState

PAUSE_MODES = ("keep", "wait", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class PausePolicy:
    """One of PAUSE_MODES, and how long the engine may take to stand still."""

    mode: str = "keep"
    deadline_s: float = 60.0

    async def pause(self, engine: Engine, state: ServerState) -> None:
        """Return when the engine stands still; EngineBusyError if it does not in time."""
        left_s = await self._drain(state) if self.mode == "wait" else self.deadline_s
        await engine.pause(self.mode, left_s)

    async def _drain(self, state: ServerState) -> float:
        """Wait for the requests that were let in; the seconds left.

        vLLM's own `wait` lets those end that it has begun. The others, on their way through the API server or
        in its queue, it would hold (0.32) or answer with 503 (0.33); here they were let in, and so they end.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + self.deadline_s
        while state.working:
            done, _ = await asyncio.wait(state.working, timeout=max(ends - clock(), 0.0))
            if not done:
                raise EngineBusyError(
                    f"{len(state.working)} requests did not end within {self.deadline_s:.0f} s: wait for the "
                    "next try, or give a longer --pause-deadline-s or --pause-mode keep"
                )
        return max(ends - clock(), 1.0)
