"""Named points of a publication at which a test can kill the process.

With `WEIGHTFERRY_TEST_KILL_AT=after-shard:2` in the environment the process ends itself with SIGKILL when
it reaches that point for the first time: no handler, no flush, as a crash or a power-off would. The points
are docs/format.md [5]'s steps: after-begin, after-shard:N, before-manifest, after-manifest, before-commit,
after-commit, after-latest; and for a server in the middle of an apply: during-apply.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "WEIGHTFERRY_TEST_KILL_AT"


def reach(point: str) -> None:
    """Say that the process has come to a point; it dies here if a test asked for it."""
    if os.environ.get(VARIABLE) == point:
        os.kill(os.getpid(), signal.SIGKILL)
