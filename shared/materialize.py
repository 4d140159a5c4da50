"""A version copied into a directory of its own: complete, and checked on the way in.

Invariant: the directory appears whole, with every file equal to its digest, or not at all. From a bucket this
is how a version becomes a Hugging Face checkpoint directory; from a slow share it is a local cache. The
caller holds a lease meanwhile. Called by `weightferry materialize` and by whoever stages a version.
Follows docs/format.md [1] and [2].
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import durable
from .digest import blocks_of
from .errors import ConfigError, IntegrityError
from .exchange import Version
from .manifest import MANIFEST_NAME, FileEntry

FILES_AT_ONCE = 4


def materialize(version: Version, directory: Path, *, sync: bool = True) -> Path:
    """Copy a version's files into `directory`, which must not exist; returns it.

    Shards that the version shares with the base come along under their names in the index. `sync=False` is
    for caches, which a power cut may tear: they are checked again or thrown away. Raises IntegrityError, and
    leaves nothing, when a file is missing or not what the manifest says.
    """
    if directory.exists():
        raise ConfigError(f"{directory} is there already; give a directory that does not exist yet")
    manifest = version.manifest
    unfinished = directory.parent / f"{durable.TEMPORARY_PREFIX}{directory.name}-{version.number}"
    durable.remove_tree(unfinished)
    try:
        for entry in manifest.files:
            durable.make_directory((unfinished / local_name(version, entry.path)).parent)
        # In a bucket the ranges of one file are fetched at the same time; more threads only get in their way.
        at_once = FILES_AT_ONCE if version.store.path is not None else 1
        with ThreadPoolExecutor(at_once, thread_name_prefix="materialize") as pool:
            copies = [pool.submit(_copy, version, entry, unfinished, sync) for entry in manifest.files]
            for copied in copies:
                copied.result()
        with durable.NewFile(unfinished / MANIFEST_NAME, sync=sync) as file:
            file.write(manifest.to_bytes())
        durable.appear(unfinished, directory, sync=sync)
    except BaseException:
        durable.remove_tree(unfinished)
        raise
    return directory


def local_name(version: Version, path: str) -> str:
    """Where a file of the manifest stands in a directory of one version."""
    prefix = f"{version.dir}/"
    return path.removeprefix(prefix) if path.startswith(prefix) else path.rpartition("/")[2]


def _copy(version: Version, entry: FileEntry, directory: Path, sync: bool) -> None:
    where = version.store.where(entry.path)
    target = directory / local_name(version, entry.path)
    if version.leads_out(entry.path):
        raise IntegrityError(where, "leads out of the exchange")
    signed = entry.sha256 is not None
    try:
        with (
            version.store.open(entry.path) as source,
            durable.NewFile(target, sha256=signed, sync=sync) as file,
        ):
            for block in blocks_of(source):
                file.write(block)
    except FileNotFoundError:
        raise IntegrityError(where, "is missing") from None
    entry.check(file.digest, where)
