"""Which process something is, in words for people and in fields that tell it from every other one.

Called by the writer's beat and by leases. A process of this same host that is provably gone need not be
waited for; of any other process only its beat tells. Follows docs/format.md [5] and [7]; fields of proc(5).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_GONE_STATES = ("Z", "X")
_FIRST_FIELD_AFTER_NAME, _STATE, _START_TIME = 3, 3, 22


def owner_name() -> str:
    """This process as people look for it: host and pid."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def process_identity() -> dict[str, Any]:
    """What tells this process from every other one, across reboots, reused pids and containers."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
    }


def is_gone_from_this_host(process: object) -> bool:
    """True only if the process lived under this kernel, in this pid namespace, and does so no more."""
    if not isinstance(process, dict) or not _boot_id() or not _pid_namespace():
        return False
    here = {"host": socket.gethostname(), "boot_id": _boot_id(), "pid_namespace": _pid_namespace()}
    if any(process.get(key) != value for key, value in here.items()):
        return False
    pid, started = process.get("pid"), process.get("started")
    return isinstance(pid, int) and bool(started) and _start_time(pid) != started


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _pid_namespace() -> str:
    """Two containers may share host name and kernel, yet not see each other's pids."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Clock ticks after boot at which a process started, "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    is_gone = fields[_STATE - _FIRST_FIELD_AFTER_NAME] in _GONE_STATES
    return "" if is_gone else fields[_START_TIME - _FIRST_FIELD_AFTER_NAME]
