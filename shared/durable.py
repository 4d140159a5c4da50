"""Durable writes and fresh reads: the only module that may fsync, rename or link.

Invariants: a file that appears under its final name through `create_exclusive`, `replace` or `link_or_copy`
is whole; what has returned survives a power cut (fsync of the file, then of its directory); nothing that
exists is ever opened for writing again, but a joint file by those who fill it. Follows docs/format.md [5];
the measurements behind each choice are in docs/decisions/002-durable-writes.md.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from .digest import FileDigest
from .errors import IntegrityError

WRITE_BLOCK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".tmp-"
Buffer = bytes | bytearray | memoryview
_ESTALE_TRIES = 10
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


def sync_directory(path: Path) -> None:
    """Make the names inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _failures_named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    """The kernel says neither which file an open descriptor is, nor what to do."""
    try:
        yield
    except OSError as error:
        advice = f"{error.strerror}: make room or mend the disk, then try again"
        raise OSError(error.errno, advice, str(path)) from error


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, each made durable in its own parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)


def let_group_write(path: Path) -> None:
    """Let the group that can read a directory make files in it, whatever the umask of its maker."""
    mode = path.stat().st_mode
    if mode & stat.S_IRGRP and not mode & stat.S_IWGRP:
        path.chmod(stat.S_IMODE(mode) | stat.S_IWGRP)


class NewFile:
    """A file written once, front to back, under its final name; digested in the same pass.

    Creation is exclusive. Leaving the `with` block fsyncs; an exception removes the file instead.
    The file follows the umask, so that a reader of the same group can open it.
    """

    def __init__(self, path: Path, *, sha256: bool = False, sync: bool = True) -> None:
        self.path, self.digest, self._sync = path, FileDigest(with_sha256=sha256), sync

    def __enter__(self) -> NewFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)
        return self

    def write(self, data: Buffer) -> None:
        """Append all bytes of a contiguous buffer."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for start in range(0, len(view), WRITE_BLOCK_BYTES):
            block = view[start : start + WRITE_BLOCK_BYTES]
            self.digest.update(block)
            while block:
                with _failures_named(self.path):
                    block = block[os.write(self._descriptor, block) :]

    @property
    def size_bytes(self) -> int:
        return self.digest.size_bytes

    @property
    def xxh3_128(self) -> str:
        return self.digest.xxh3_128

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_whole = False
        try:
            if kind is None:
                with _failures_named(self.path):
                    if self._sync:
                        os.fsync(self._descriptor)  # on NFS only fsync reports a full disk
                is_whole = True
        finally:
            os.close(self._descriptor)
            if not is_whole:
                self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)


def create_joint(path: Path, head: bytes, size_bytes: int) -> None:
    """Make a file of this size that begins with `head`, for several processes of this host to fill."""
    with NewFile(path, sync=False) as file:
        file.write(head)
        with _failures_named(path):
            os.truncate(path, size_bytes)


class FilePart:
    """Some bytes of a joint file; leaving the `with` block makes them durable."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> FilePart:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        return self

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all bytes of a contiguous buffer from `offset` on."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BLOCK_BYTES):
            block, position = view[start : start + WRITE_BLOCK_BYTES], offset + start
            while block:
                with _failures_named(self.path):
                    written = os.pwrite(self._descriptor, block, position)
                block, position = block[written:], position + written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with _failures_named(self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@contextmanager
def _beside(path: Path, data: bytes, *, sync: bool) -> Iterator[Path]:
    """A whole temporary file in the directory of `path`; gone again on exit, whatever happened."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        with NewFile(temporary, sync=sync) as file:
            file.write(data)
        yield temporary
    finally:
        remove_file(temporary)


def create_exclusive(path: Path, data: bytes) -> None:
    """Create `path` whole and durable, or raise FileExistsError; exactly one racing caller wins.

    `link()` is atomic and exclusive on local disks and on NFS, where a lost answer can make the client
    repeat a link that succeeded: then the temporary file has two names, and the file is ours.
    """
    try:
        _create_once(path, data)
    except FileNotFoundError:  # somebody who became the writer swept our temporary file
        _create_once(path, data)


def _create_once(path: Path, data: bytes) -> None:
    with _beside(path, data, sync=True) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            if temporary.stat().st_nlink != 2:
                raise
        sync_directory(path.parent)


def replace(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a small file atomically. `sync=False` is for beats, whose loss in a power cut is harmless."""
    try:
        _replace_once(path, data, sync=sync)
    except FileNotFoundError:  # as in create_exclusive
        _replace_once(path, data, sync=sync)


def _replace_once(path: Path, data: bytes, *, sync: bool) -> None:
    with _beside(path, data, sync=sync) as temporary:
        os.rename(temporary, path)
    if sync:
        sync_directory(path.parent)


def appear(unfinished: Path, final: Path, *, sync: bool = True) -> None:
    """Give a finished directory its name; OSError if something has that name."""
    for directory, _, _ in os.walk(unfinished) if sync else ():
        sync_directory(Path(directory))
    os.rename(unfinished, final)
    if sync:
        sync_directory(final.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Give an immutable file a second name; where the file system has no links, copy it durably."""
    try:
        os.link(source, target)
    except FileExistsError:  # also a lost answer to our own call that the client repeated
        if not os.path.samefile(source, target):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        beside = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        with source.open("rb") as reader, NewFile(beside) as file:
            while block := reader.read(WRITE_BLOCK_BYTES):
                file.write(block)
        os.rename(beside, target)


def require_regular(path: Path) -> None:
    """IntegrityError for what is no file of bytes: to open a pipe would wait for its writer."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise IntegrityError(path, "is not a regular file")


def read_fresh(path: Path) -> bytes | None:
    """The bytes of a small file as they are now, or None if there is none.

    Opening the parent first makes an NFS v4 client revalidate the name (else a replaced file can be
    stale for 40 ms); NFS v3 answers ESTALE now and then for a file that was just replaced.
    """
    for _ in range(_ESTALE_TRIES):
        try:
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
            require_regular(path)
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    raise OSError(errno.ESTALE, f"still stale after {_ESTALE_TRIES} tries", str(path))


def list_fresh(directory: Path) -> list[str]:
    """The names in a directory, sorted, without unfinished writes; a listing is fresh on NFS too."""
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith(TEMPORARY_PREFIX))
    except FileNotFoundError:
        return []


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, links not followed; what is already gone is fine."""
    if path.is_symlink():
        return remove_file(path)
    for directory, folders, names in os.walk(path, topdown=False):
        for name in [*names, *(folder for folder in folders if Path(directory, folder).is_symlink())]:
            remove_file(Path(directory, name))
        with suppress(FileNotFoundError):
            os.rmdir(directory)
    return None


def remove_file(path: Path) -> None:
    """Remove a file; one that is already gone is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def sweep_temporaries(directory: Path) -> int:
    """Remove what a killed process left half-written in a directory; returns how many."""
    if not directory.is_dir():
        return 0
    leftovers = [path for path in directory.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
    for path in leftovers:
        remove_file(path)
    return len(leftovers)
