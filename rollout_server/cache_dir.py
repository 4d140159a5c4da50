"""The host-local directory for staged files: one process's own, as long as that process lives.

Invariant: a lock (flock, which the kernel gives back however the process ends) is held on the directory, so
that no second server stages into it or sweeps it. The plug-in takes it, before the stager.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ..shared.errors import ConfigError

LOCK_NAME = "lock"
PRIVATE_PREFIX = "weightferry-cache-"
_held: list[int] = []  # descriptors of this process's locks; closing one would give its lock back


def take_cache_dir(directory: str) -> Path:
    """The directory, made and locked; a private temporary one where none is named.

    ConfigError if another process holds it.
    """
    if not directory:
        _sweep_abandoned(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    else:
        path = Path(directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
    _held.append(_require_lock(path))
    return path


def require_free(directory: str) -> None:
    """ConfigError if another process holds the directory: what can be said before vLLM starts."""
    path = Path(directory)
    if directory and (path / LOCK_NAME).exists():
        os.close(_require_lock(path))


def _require_lock(path: Path) -> int:
    lock = _lock(path)
    if lock is None:
        raise ConfigError(f"the cache directory {path} is another running server's: give each its own")
    return lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if another process does."""
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep_abandoned(parent: Path) -> None:
    """Remove this user's private directories whose server was killed: they may hold whole models."""
    for path in parent.glob(f"{PRIVATE_PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            # without a lock file its server is just starting, or this is not ours
            if (path / LOCK_NAME).exists() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
