"""A LocalStore that lags as an NFS v4.2 client was measured to: for tests without a server.

Negative lookups are cached for 30 s unless the parent directory was opened since; listings are fresh; opening
an existing file reads the present bytes; a full server shows at fsync only.
Each instance is one client. Time is the test's.
"""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import patch

NEGATIVE_CACHE_S = 30.0


class NfsClient:
    """Wraps the `os` that `durable` sees. `with client.mounted():` is this client's view."""

    def __init__(self, os_module, clock) -> None:
        self._os, self._clock = os_module, clock
        self._absent_until: dict[str, float] = {}
        self.full = False

    def __getattr__(self, name):
        return getattr(self._os, name)

    def open(self, path, flags, *rest):
        descriptor = self._os.open(path, flags, *rest)
        if flags & self._os.O_DIRECTORY:  # close-to-open: the directory's attributes are asked for anew
            self._forget_below(Path(path))
        return descriptor

    def listdir(self, path):
        self._forget_below(Path(path))
        return self._os.listdir(path)

    def fsync(self, descriptor):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._os.fsync(descriptor)

    def lookup(self, path: Path) -> None:
        """Raise FileNotFoundError from the cache, or remember that there is no such file."""
        key = str(path)
        if self._absent_until.get(key, 0.0) > self._clock():
            raise FileNotFoundError(errno.ENOENT, "absent when last asked", key)
        if not path.exists():
            self._absent_until[key] = self._clock() + NEGATIVE_CACHE_S

    def _forget_below(self, directory: Path) -> None:
        self._absent_until = {
            key: until for key, until in self._absent_until.items() if Path(key).parent != directory
        }

    def mounted(self):
        real_read = Path.read_bytes

        def read_bytes(path):
            self.lookup(path)
            return real_read(path)

        return _Both(
            patch("weightferry.shared.durable.os", self), patch.object(Path, "read_bytes", read_bytes)
        )


class _Both:
    def __init__(self, *patches) -> None:
        self._patches = patches

    def __enter__(self):
        [one.__enter__() for one in self._patches]

    def __exit__(self, *details):
        [one.__exit__(*details) for one in reversed(self._patches)]
