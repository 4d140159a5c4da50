"""Faults at the storage calls: a process that dies before or after the n-th one, full disks, lost answers.

`posix_calls(fault)` puts a fault under everything that `durable` does, `client_calls(store, fault)` under
everything that a bucket's client does. A dead process makes no further call, so no clean-up of the product
can help it. Beats are silenced meanwhile, so that calls come in one order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from unittest.mock import patch

from weightferry.shared.digest import canonical_json

POSIX_CALLS = ("open", "write", "fsync", "link", "rename", "mkdir", "unlink", "rmdir", "listdir")
CLIENT_CALLS = ("pipe_file", "cat_file", "ls", "find", "info", "rm_file", "call_s3", "open")


class Crash(BaseException):
    """The process is dead; nothing in it may run any more."""


class Fault:
    """Does nothing but count; the others derive from it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        self.num_calls += 1
        return call(*arguments, **options)


class CrashAt(Fault):
    """Die right before or right after call number `at` (from 1); `die` is what dying is."""

    def __init__(self, at: int, *, after: bool, die: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.at, self.after, self._die, self.is_dead = at, after, die, False

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        if self.is_dead:
            raise Crash
        self.num_calls += 1
        if self.num_calls != self.at:
            return call(*arguments, **options)
        if self.after:
            with suppress(Exception):
                call(*arguments, **options)
        self.is_dead = True
        if self._die:
            self._die()
        raise Crash


class FullAt(Fault):
    """The disk takes so many bytes of the n-th file (from 1) and then is full for good."""

    def __init__(self, file: int, num_bytes: int, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self._file, self._room, self._error = file, num_bytes, error
        self._num_files, self._in_file, self.is_full = 0, False, False

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        if name == "open" and arguments[1] & os.O_CREAT:
            if self.is_full:
                raise OSError(self._error, os.strerror(self._error), str(arguments[0]))
            self._num_files += 1
            self._in_file = self._num_files == self._file
        if name == "write" and self._in_file:
            if self._room <= 0:
                self.is_full = True
                raise OSError(self._error, os.strerror(self._error))
            descriptor, data = arguments
            written = call(descriptor, data[: self._room])
            self._room -= written
            return written
        return super().around(name, call, arguments, options)


class FullAtSync(Fault):
    """The n-th fsync (from 1) and all later ones say that the disk is full, as on NFS."""

    def __init__(self, at: int, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self._at, self._error, self._num_syncs = at, error, 0

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        if name == "fsync":
            self._num_syncs += 1
            if self._num_syncs >= self._at:
                raise OSError(self._error, os.strerror(self._error))
        return super().around(name, call, arguments, options)


class ShortWrites(Fault):
    """Every write takes a few bytes only."""

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        if name == "write":
            return call(arguments[0], arguments[1][:7])
        return super().around(name, call, arguments, options)


class LostLinks(Fault):
    """Every link() succeeds, yet its answer is lost and the repeated call says EEXIST, as NFS clients do."""

    def around(self, name: str, call: Callable, arguments: tuple, options: dict) -> Any:
        answer = super().around(name, call, arguments, options)
        if name == "link":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        return answer


class _Calls:
    """An object of which some calls go through a fault."""

    def __init__(self, real: Any, names: tuple[str, ...], fault: Fault) -> None:
        self._real, self._names, self._fault = real, names, fault

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self._names:
            return value
        return lambda *arguments, **options: self._fault.around(name, value, arguments, options)


class SilentBeat:
    """A beat without a thread: it writes its file when it is made, and when a test says `beat`."""

    living: ClassVar[list[SilentBeat]] = []
    last_error = None

    def __init__(self, store: Any, path: str, content: Callable[[int], dict], _ttl_s: float) -> None:
        self._store, self.path, self._content, self._count = store, path, content, -1
        self.beat()
        self.living.append(self)

    def beat(self) -> None:
        self._count += 1
        self._store.replace(self.path, canonical_json(self._content(self._count)))

    def close(self) -> None:
        if self in self.living:
            self.living.remove(self)


@contextmanager
def silent_beats() -> Iterator[None]:
    with (
        patch("weightferry.shared.writer.Beat", SilentBeat),
        patch("weightferry.shared.lease.Beat", SilentBeat),
    ):
        yield


@contextmanager
def posix_calls(fault: Fault) -> Iterator[Fault]:
    with patch("weightferry.shared.durable.os", _Calls(os, POSIX_CALLS, fault)), silent_beats():
        yield fault


@contextmanager
def client_calls(store: Any, fault: Fault) -> Iterator[Fault]:
    with patch.object(store, "_fs", _Calls(store._fs, CLIENT_CALLS, fault)), silent_beats():
        yield fault
