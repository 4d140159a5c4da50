"""Where an exchange lies: the few operations that it needs, the same on a directory and on a bucket.

Every path is relative to the exchange, with `/`. The promises below are what the safety of the format rests
on; tests/store_contract.py checks each of them against every back end. Called by everything in `shared`
that touches an exchange. Follows docs/format.md [1] and [5].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from . import durable
from .digest import FileDigest
from .errors import FormatError
from .ranged_reader import RangedReader

Buffer = bytes | bytearray | memoryview


class Upload(Protocol):
    """A file on its way: written once, front to back, digested in the same pass."""

    digest: FileDigest

    def write(self, data: Buffer) -> None: ...


class Store(Protocol):
    """What an exchange needs of the place it lies in.

    `path` is the directory, or None where there is none (then readers copy files before they use them).
    """

    @property
    def path(self) -> Path | None: ...

    @property
    def has_links(self) -> bool: ...

    def where(self, path: str) -> str:
        """The full name of a file, for messages."""
        ...

    def read(self, path: str) -> bytes | None:
        """A small file as it is now, past every cache; None if there is none."""
        ...

    def list(self, directory: str) -> list[str]:
        """The names directly below a directory as they are now, sorted; unfinished writes are hidden."""
        ...

    def list_started(self, directory: str) -> list[str]:
        """As `list`, and also what exists only as an unfinished upload."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """Make a file whole and durable, or raise FileExistsError; of racing callers exactly one wins.

        A lost answer to a call that succeeded must come out as success: the data tells whose file it is.
        """
        ...

    def replace(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Replace a small file atomically; `sync=False` may lose it in a power cut (beats)."""
        ...

    def new_file(self, path: str, *, sha256: bool = False) -> AbstractContextManager[Upload]:
        """Write a large file under a name that nobody used before; an exception leaves nothing there."""
        ...

    def share(self, source: str, target: str) -> None:
        """With `has_links`, give an immutable file a second name; else do nothing: readers use `source`."""
        ...

    def seal(self, directories: Iterable[str]) -> None:
        """Make the names inside these directories durable."""
        ...

    def open(self, path: str) -> BinaryIO | RangedReader:
        """A large file for reading and seeking, never memory-mapped; FileNotFoundError if there is none."""
        ...

    def size(self, path: str) -> int | None:
        """Size in bytes, None if there is no such file."""
        ...

    def files_below(self, directory: str) -> list[str]:
        """Every file below a directory, at any depth, as paths below the exchange."""
        ...

    def make_directory(self, path: str, *, group_writes: bool = False) -> None:
        """Make it and its parents; `group_writes` lets other users of the same group make files there."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; one that is gone is fine."""
        ...

    def remove_tree(self, directory: str, *, first: str, after_first: Callable[[], None]) -> None:
        """Remove a directory, the file named `first` before all others, so that a half-removed one shows."""
        ...

    def sweep(self, directory: str) -> int:
        """Remove what killed processes left unfinished directly in a directory; returns how many."""
        ...


class LocalStore:
    """A directory on a file system, local or shared; durability is `durable`'s."""

    has_links = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, path: str) -> str:
        return str(self.path / path)

    def read(self, path: str) -> bytes | None:
        try:
            return durable.read_fresh(self.path / path)
        except IsADirectoryError:
            raise FormatError(
                f"{self.where(path)} is a directory where a file belongs; look who made it, and remove it"
            ) from None

    def list(self, directory: str) -> list[str]:
        return durable.list_fresh(self.path / directory)

    def list_started(self, directory: str) -> list[str]:
        return self.list(directory)

    def create(self, path: str, data: bytes) -> None:
        durable.create_exclusive(self.path / path, data)

    def replace(self, path: str, data: bytes, *, sync: bool = True) -> None:
        durable.replace(self.path / path, data, sync=sync)

    def new_file(self, path: str, *, sha256: bool = False) -> durable.NewFile:
        return durable.NewFile(self.path / path, sha256=sha256)

    def share(self, source: str, target: str) -> None:
        durable.link_or_copy(self.path / source, self.path / target)

    def seal(self, directories: Iterable[str]) -> None:
        for directory in directories:
            durable.sync_directory(self.path / directory)

    def open(self, path: str) -> BinaryIO:
        durable.require_regular(self.path / path)
        return (self.path / path).open("rb")

    def size(self, path: str) -> int | None:
        try:
            return (self.path / path).stat().st_size
        except FileNotFoundError:
            return None

    def files_below(self, directory: str) -> list[str]:
        found = (
            path for path in (self.path / directory).rglob("*") if not path.is_dir() or path.is_symlink()
        )
        return sorted(str(path.relative_to(self.path)) for path in found)

    def make_directory(self, path: str, *, group_writes: bool = False) -> None:
        durable.make_directory(self.path / path)
        if group_writes:
            durable.let_group_write(self.path / path)

    def remove(self, path: str) -> None:
        durable.remove_file(self.path / path)

    def remove_tree(
        self, directory: str, *, first: str = "", after_first: Callable[[], None] = lambda: None
    ) -> None:
        if first:
            durable.remove_file(self.path / directory / first)
        after_first()
        durable.remove_tree(self.path / directory)

    def sweep(self, directory: str) -> int:
        return durable.sweep_temporaries(self.path / directory)


def open_store(url: str | Path) -> Store:
    """The store at a path, a `file://` URL, or any other fsspec URL such as `s3://bucket/prefix`."""
    text = str(url).removeprefix("file://")
    if "://" not in text:
        return LocalStore(Path(text).absolute())
    from .object_store import open_object_store

    return open_object_store(text)
