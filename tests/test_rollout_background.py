"""A file system that hangs costs its call, not the next ones, and not the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from weightferry.rollout_server.background import Background
from weightferry.shared.errors import ApplyError

HANGS = """
import asyncio, threading
from weightferry.rollout_server.background import Background
try:
    asyncio.run(Background(0.2).run("reading", threading.Event().wait))
except Exception as error:
    print(error)
"""


def test_results_and_errors_come_back():
    background = Background(30)
    assert asyncio.run(background.run("adding", lambda: 1 + 1)) == 2
    with pytest.raises(TimeoutError, match="the server is gone"):
        asyncio.run(background.run("reading", raise_timeout))


def raise_timeout() -> None:
    raise TimeoutError("the server is gone")  # as NFS says ETIMEDOUT: not our deadline


def test_a_call_that_has_not_begun_by_its_deadline_never_runs():
    background, release, ran = Background(0.2), threading.Event(), []

    async def story() -> None:
        with pytest.raises(ApplyError, match="reading did not end within 0 s"):
            await background.run("reading", release.wait)
        with pytest.raises(ApplyError, match="listing did not end"):
            await background.run("listing", lambda: ran.append("listing"))
        release.set()
        await background.run("writing", lambda: ran.append("writing"), num_bytes=1 << 30)

    asyncio.run(story())
    assert ran == ["writing"]


def test_a_call_that_hangs_does_not_keep_the_process():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "reading did not end within 0 s\n")


def test_what_is_done_later_is_done_before_the_next_call_and_its_error_harms_nobody():
    background, done = Background(30), []
    background.later(lambda: done.append("deleted"))
    background.later(raise_timeout)
    assert asyncio.run(background.run("looking", lambda: list(done))) == ["deleted"]
