"""A real NFS v4.2 server with two clients, in a kernel of its own: user-mode Linux, from Debian's packages.

The guest's root is this machine's own, read-only, so that it runs this very Python and these very sources.
Server and clients have network name spaces of their own inside the guest; the clients' caches are as
separate as on two hosts. Nothing is installed: packages are unpacked into a cache directory of the user.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weightferry

PACKAGES = (
    "user-mode-linux", "nfs-kernel-server", "nfs-common", "libwrap0", "libtirpc3", "libnfsidmap1",
    "libevent-core-2.1-7",
)  # fmt: skip
NEEDS = "a real NFS server in user-mode Linux runs on Debian 12, x86-64, with its package lists and gcc"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weightferry" / "nfs-machine"
XSTATE_SOURCE = Path(__file__).with_name("nfs_xstate.c")
GUEST = Path(__file__).with_name("nfs_guest.py")
ROLES = ("a", "b")


def require_machine() -> Path:
    """The directory with the unpacked packages; a skip that says what this machine lacks."""
    has_tools = all(map(shutil.which, ("apt-get", "dpkg", "cc", "ip")))
    if platform.machine() != "x86_64" or not has_tools:
        pytest.skip(NEEDS)
    unpacked = CACHE / "root"
    if not (unpacked / "usr/bin/linux.uml").exists():
        _unpack(CACHE)
    library = CACHE / "xstate.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, XSTATE_SOURCE, "-ldl"], check=True)
    return unpacked


def run_story(story: str, directory: Path, deadline_s: float = 300.0) -> dict[str, dict[str, Any]]:
    """Boot, let each client play its role of a story (nfs_stories.py), halt; what each role reported.

    A role that failed fails the test, with everything that the guest printed.
    """
    unpacked = require_machine()
    out = directory / "out"
    out.mkdir(parents=True)
    start = directory / "init.sh"
    start.write_text(_start_script(unpacked, out, story))
    start.chmod(0o755)
    command = [
        str(unpacked / "usr/bin/linux.uml"), "mem=2G", "rootfstype=hostfs", "rootflags=/", "ro",
        f"init={start}", "con=null", "con0=fd:0,fd:1", "quiet",
    ]  # fmt: skip
    environment = os.environ | {"LD_PRELOAD": str(CACHE / "xstate.so"), "TMPDIR": "/dev/shm"}
    guest = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=deadline_s,
    )
    printed = guest.stdout.decode(errors="replace")
    reports = {role: out / f"{role}.json" for role in ROLES}
    assert all(report.exists() for report in reports.values()), printed[-6000:]
    return {role: json.loads(report.read_bytes()) for role, report in reports.items()}


def _start_script(unpacked: Path, out: Path, story: str) -> str:
    """What the guest's kernel starts as its first process."""
    package = Path(weightferry.__file__).resolve().parent
    paths = [str(GUEST.parent), *([str(package.parent)] if package.name == "weightferry" else [])]
    return (
        "#!/bin/sh\n"
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run OMP_NUM_THREADS=1\n"
        f"export PYTHONPATH={':'.join(paths)} PYTHONDONTWRITEBYTECODE=1\n"
        f"exec {sys.executable} {GUEST} {unpacked} {out} {story}\n"
    )


def _unpack(cache: Path) -> None:
    downloads = cache / "packages"
    shutil.rmtree(cache, ignore_errors=True)
    downloads.mkdir(parents=True)
    fetched = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=downloads, capture_output=True, text=True
    )
    if fetched.returncode != 0:
        pytest.skip(f"{NEEDS}; apt-get said: {fetched.stderr.strip().splitlines()[-1:]}")
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, cache / "root"], check=True)
