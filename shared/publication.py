"""One version being written: its new directory, its files, its manifest, its commit.

Invariants: the manifest is the last file and the log entry the last act; until then no reader can see any of
it. Called by the exporter, on the rank that commits; what other ranks wrote beside it is entered before.
Follows docs/format.md [5] 3, 5 and 6.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import INDEX_NAME
from .commit_log import now
from .digest import canonical_json
from .errors import UsageError
from .exchange import VERSIONS_NAME, Version
from .kill_points import reach
from .manifest import (
    MANIFEST_NAME,
    AdapterEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    WriterInfo,
    manifest_id,
)
from .pointer import point_at_newest
from .signing import sign_manifest
from .tensor_files import TensorSpec
from .version_files import VersionFiles

if TYPE_CHECKING:
    from .writer import ExchangeWriter

_PACKAGES = ("weightferry", "torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFields:
    """What the exporter knows about a version beyond its files; see Manifest."""

    published: str
    world_size: int
    adapter: AdapterEntry | None = None
    merge: dict[str, str] | None = None
    fidelity: dict[str, Any] | None = None
    tied: tuple[tuple[str, str], ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)


class Publication(VersionFiles):
    """A version on its way. Write its files, then `commit`; `abandon` removes it."""

    def __init__(self, writer: ExchangeWriter, *, relative_dir: str, step: int) -> None:
        super().__init__(
            writer.exchange,
            relative_dir,
            base_shards=writer.base_shards,
            is_signed=writer.signing_key is not None,
        )
        self._writer, self.step = writer, step
        self._store.make_directory(relative_dir)
        reach("after-begin")

    @property
    def dir(self) -> Path:
        """The version's directory; UnsupportedError where there is none (a bucket)."""
        return self._exchange.path / self.relative_dir

    def enter(self, files: Iterable[FileEntry], tensors: Iterable[TensorEntry]) -> None:
        """Take in what another rank wrote, made durable and digested in this version's directory."""
        for entry in tensors:
            self._enter_tensor(entry)
        self.files += files

    def write_index(self) -> FileEntry:
        """Write `model.safetensors.index.json` over the shards entered so far."""
        weight_map = {entry.name: Path(entry.file).name for entry in self.tensors}
        spans = (TensorSpec(name=e.name, dtype=e.dtype, shape=e.shape).size_bytes for e in self.tensors)
        index = {"metadata": {"total_size": sum(spans)}, "weight_map": weight_map}
        return self.write_file(INDEX_NAME, canonical_json(index))

    def commit(self, fields: ManifestFields) -> Version:
        """Write the manifest, make everything durable, and append the version to the log.

        Raises WriterFencedError, and nothing appears, when a newer writer has taken over.
        """
        reach("before-manifest")
        manifest, key = self._manifest(fields), self._writer.signing_key
        data = (manifest if key is None else sign_manifest(manifest, key)).to_bytes()
        with self._store.new_file(f"{self.relative_dir}/{MANIFEST_NAME}") as file:
            file.write(data)
        self.seal()
        self._store.seal([self.relative_dir, VERSIONS_NAME])
        reach("after-manifest")
        reach("before-commit")
        entry = self._exchange.log.append(
            kind="version",
            epoch=self._writer.epoch,
            run_id=self._writer.run_id,
            owner=self._writer.owner,
            dir=self.relative_dir,
            step=self.step,
            manifest_sha256=manifest_id(data),
            decide=self._retention,
        )
        reach("after-commit")
        point_at_newest(self._exchange)
        reach("after-latest")
        self._writer.prune()
        return Version(self._exchange.store, entry)

    def _retention(self, number: int) -> dict[str, Any]:
        """The commit says at once what it leaves to deletion, so that it costs no entry of its own."""
        decided = self._writer.pruner.decide(number, self.step)
        return {} if decided is None else asdict(decided)

    def abandon(self) -> None:
        """Remove what was written, after a failure at any point before the commit.

        UsageError if the log names it: a version is only ever removed by retention.
        """
        self._exchange.log.absorb()
        for entry in self._exchange.log.versions:
            if entry.dir == self.relative_dir:
                raise UsageError(
                    f"{self._store.where(self.relative_dir)} is version {entry.number}, committed; "
                    "nothing was removed (retention or `weightferry gc` does that)"
                )
        self._store.remove_tree(self.relative_dir, first=MANIFEST_NAME, after_first=lambda: None)

    def _manifest(self, fields: ManifestFields) -> Manifest:
        return Manifest(
            exchange_id=self._exchange.exchange_id,
            run_id=self._writer.run_id,
            epoch=self._writer.epoch,
            step=self.step,
            created=now(),
            writer=_writer_info(fields.world_size),
            base=self._exchange.base,
            published=fields.published,
            files=tuple(sorted(self.files, key=lambda entry: entry.path)),
            tensors=tuple(sorted(self.tensors, key=lambda entry: entry.name)),
            adapter=fields.adapter,
            merge=fields.merge,
            fidelity=fields.fidelity,
            tied=fields.tied,
            metrics=fields.metrics,
        )


def _writer_info(world_size: int) -> WriterInfo:
    packages = {}
    for package in _PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "unknown"
    return WriterInfo(host=socket.gethostname(), pid=os.getpid(), world_size=world_size, packages=packages)
