"""What processes are there: whether they still run, and what is below one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Not gone, and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Iterable[int], what: str, deadline_s: float) -> None:
    """Fail with `what` if one of them still runs at the deadline."""
    deadline = time.monotonic() + deadline_s
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def titled(title: str, pid: int) -> int:
    """The one process below this one whose title begins so."""
    (found,) = (
        child
        for child in descendants(pid)
        if Path(f"/proc/{child}/cmdline").read_bytes().startswith(title.encode())
    )
    return found
