"""Before a server of merged weights listens: its engine must load the base again as it loaded it first.

A reload goes through other code than the first load, and where that is wrong vLLM says nothing: 0.32 does not
lay out experts for its kernels on a CPU, and does not load GPT-OSS's experts at all. So all weights are set
to zero, the very same bytes are loaded, and every weight must be what it was. This also finds an engine that
was started on another checkpoint than the server's base.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from ..shared.checkpoint import Checkpoint
from ..shared.errors import ApplyError, UnsupportedError
from .engine import Part
from .weights import WeightSet, plan_reload

logger = logging.getLogger("weightferry.rollout_server")
NUM_NAMED = 3


class ReloadableEngine(Protocol):
    """What is checked; engine.VllmEngine is one."""

    async def weight_checksums(self) -> dict[str, str]: ...

    async def reload_from_zero(self, parts: tuple[Part, ...]) -> int: ...


async def require_faithful_reload(
    engine: ReloadableEngine, base: Checkpoint, digests: dict[str, str]
) -> None:
    """Load all of the base once more; UnsupportedError names the weights that this changes.

    `digests` are the xxh3-128 of its tensors. Costs a reload, and two SHA-256 of what each worker holds.
    """
    started = time.monotonic()
    plan = plan_reload(None, WeightSet.of_base(base, digests), base.specs)
    before = await engine.weight_checksums()
    try:
        num_loaded = await engine.reload_from_zero(plan.parts)
    except ApplyError as error:
        raise UnsupportedError(
            f"vLLM cannot load the base {base.path} again: {error}; serve with --apply adapter"
        ) from None
    after = await engine.weight_checksums()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed or num_loaded != plan.num_tensors:
        raise UnsupportedError(
            f"vLLM does not hold the same weights after loading {base.path} again ({num_loaded} of "
            f"{plan.num_tensors} tensors read; changed: {_some(changed)}), so that merged weights would be "
            "served wrong: serve with --apply adapter, or, if vLLM was started on another checkpoint, on this"
        )
    seconds = time.monotonic() - started
    logger.info("rollout_server: vLLM loads the base again as it was, in %.1f s", seconds)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return (", ".join(names[:NUM_NAMED]) or "none") + more
