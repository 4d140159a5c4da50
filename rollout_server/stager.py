"""Fetching a version's own files to this host, checked while they are copied.

Invariant: what `stage` returns lies in a directory that only this server uses and equals the manifest byte
for byte; nothing in the exchange is needed any more. Bounded: the caller drops what it no longer serves.
Unchanged tensors are not fetched: they are the base's, which this server has.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import xxhash

from ..shared.errors import IntegrityError
from ..shared.exchange import Version
from ..shared.manifest import FileEntry

BLOCK_BYTES = 8 << 20


class Stager:
    """Copies versions below one cache directory."""

    def __init__(self, cache_dir: Path) -> None:
        self._root = cache_dir
        for leftover in cache_dir.glob("version-*"):  # of a server that was killed
            shutil.rmtree(leftover)

    def directory(self, number: int) -> Path:
        return self._root / f"version-{number:012d}"

    def stage(self, version: Version, files: list[FileEntry]) -> dict[str, Path]:
        """Copy these files; returns manifest path -> local path. IntegrityError names what is wrong."""
        target = self.directory(version.number)
        shutil.rmtree(target, ignore_errors=True)
        return {entry.path: self._copy(version, entry, target) for entry in files}

    def drop(self, number: int) -> None:
        shutil.rmtree(self.directory(number), ignore_errors=True)

    def _copy(self, version: Version, entry: FileEntry, target: Path) -> Path:
        local = target / entry.path.removeprefix(f"{version.dir}/")
        local.parent.mkdir(parents=True, exist_ok=True)
        where, state, size = version.store.where(entry.path), xxhash.xxh3_128(), 0
        try:
            with version.store.open(entry.path) as source, local.open("wb") as copy:
                while block := source.read(BLOCK_BYTES):
                    state.update(block)
                    size += len(block)
                    copy.write(block)
        except FileNotFoundError:
            raise IntegrityError(where, "is missing") from None
        if size != entry.size_bytes:
            raise IntegrityError(where, "has a wrong size in bytes", expected=entry.size_bytes, found=size)
        if (found := state.hexdigest()) != entry.xxh3_128:
            raise IntegrityError(where, "has other bytes", expected=entry.xxh3_128, found=found)
        return local
