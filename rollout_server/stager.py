"""Fetching a version's own files to this host, checked while they are copied.

Invariant: what `stage` returns lies in a directory that only this server uses and equals the manifest byte
for byte; nothing in the exchange is needed any more. Bounded: a failed fetch leaves nothing behind, and the
caller drops what it no longer serves. Unchanged tensors are not fetched: they are the base's, which this
server has.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..shared.digest import blocks_of
from ..shared.errors import IntegrityError
from ..shared.exchange import Version
from ..shared.manifest import FileEntry


class Stager:
    """Copies versions below one cache directory, which is this process's own (`take_cache_dir`).

    `fetched_bytes` counts all that was ever copied, of versions that were refused, too.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._root, self.fetched_bytes = cache_dir, 0
        for leftover in cache_dir.glob("version-*"):  # of a server that was killed
            shutil.rmtree(leftover)

    def directory(self, number: int) -> Path:
        return self._root / f"version-{number:012d}"

    def stage(self, version: Version, files: list[FileEntry]) -> dict[str, Path]:
        """Copy these files; returns manifest path -> local path. IntegrityError names what is wrong."""
        self.drop(version.number)
        try:
            return {entry.path: self._copy(version, entry) for entry in files}
        except BaseException:
            self.drop(version.number)
            raise

    def drop(self, number: int) -> None:
        shutil.rmtree(self.directory(number), ignore_errors=True)

    def _copy(self, version: Version, entry: FileEntry) -> Path:
        where, digest = version.store.where(entry.path), entry.digest
        if version.leads_out(entry.path):
            raise IntegrityError(where, "is a link that leads out of the exchange")
        local = self.directory(version.number) / entry.path.removeprefix(f"{version.dir}/")
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            with version.store.open(entry.path) as source, local.open("wb") as copy:
                for block in blocks_of(source):
                    digest.update(block)
                    copy.write(block)
                    self.fetched_bytes += len(block)
                    if digest.size_bytes > entry.size_bytes:
                        break  # one that is longer than its manifest says is not copied to its end
        except FileNotFoundError:
            raise IntegrityError(where, "is missing") from None
        entry.check(digest, where)
        return local
