"""Which Internet addresses a command and all that it starts bind and connect to, by strace."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

STRACE = shutil.which("strace")
ADDRESS = re.compile(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"')


def traced(calls: Path, *, is_detached: bool = False) -> list[str]:
    """What to put before a command; nothing where there is no strace. Detached: the command, and not strace,
    is the caller's child, which may signal it."""
    if STRACE is None:
        return []
    options = ["-f", "--seccomp-bpf", "-e", "trace=connect,bind", "-o", str(calls)]
    return [STRACE, *(["-D"] if is_detached else []), *options]


def addresses(calls: Path, call: str) -> set[str]:
    """The addresses of all calls of this name so far: "connect" or "bind"."""
    lines = [line for line in calls.read_text().splitlines() if re.match(rf"\d+ +{call}\(", line)]
    return {address for line in lines for address in ADDRESS.findall(line)}
