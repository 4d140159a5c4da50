"""One version being written: its new directory, its shards, its manifest, its commit.

Invariants: every file is created once, under its final name, in a directory that only this attempt uses;
the manifest is the last file and the log entry the last act; until then no reader can see any of it.
Called by the exporter, on the rank that writes. Follows docs/format.md [5] 3, 5 and 6.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import INDEX_NAME
from .commit_log import now
from .digest import FileDigest, canonical_json, sha256_hex, stream_xxh3_128, xxh3_128
from .errors import FormatError, IntegrityError
from .exchange import BASE_NAME, VERSIONS_NAME, Version
from .kill_points import reach
from .manifest import (
    MANIFEST_NAME,
    AdapterEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    WriterInfo,
    check_path,
    manifest_id,
)
from .pointer import point_at_newest
from .signing import sign_manifest
from .store import Upload
from .tensor_files import TensorSpec, plan_file

if TYPE_CHECKING:
    from .writer import ExchangeWriter

Buffer = bytes | bytearray | memoryview
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


class Publication:
    """A version on its way. Write its files, then `commit`; `abandon` removes it."""

    def __init__(self, writer: ExchangeWriter, *, relative_dir: str, step: int) -> None:
        self._writer, self._exchange, self._store = writer, writer.exchange, writer.exchange.store
        self.relative_dir, self.step = relative_dir, step
        self.files: list[FileEntry] = []
        self.tensors: list[TensorEntry] = []
        self._num_shards = 0
        self._store.make_directory(relative_dir)
        reach("after-begin")

    @property
    def dir(self) -> Path:
        """The version's directory; UnsupportedError where there is none (a bucket)."""
        return self._exchange.path / self.relative_dir

    def write_file(self, name: str, data: bytes) -> FileEntry:
        """Write a small file; `name` is below the version's directory, e.g. "adapter/adapter_config.json"."""
        path = self._new_path(name)
        with self._new_file(path) as file:
            file.write(data)
        return self._record(path, file.digest)

    def write_shard(
        self, name: str, tensors: Sequence[tuple[TensorSpec, Buffer]], *, changed: bool = True
    ) -> FileEntry:
        """Write a safetensors shard and enter its tensors, digested in the same pass.

        Each buffer holds the tensor's bytes, C order, little-endian, and must have exactly its spec's size.
        """
        entry = self._write_tensors(name, tensors, track=True, changed=changed)
        self._num_shards += 1
        reach(f"after-shard:{self._num_shards}")
        return entry

    def write_tensor_file(self, name: str, tensors: Sequence[tuple[TensorSpec, Buffer]]) -> FileEntry:
        """Write a safetensors file that is not part of the checkpoint (an adapter's weights)."""
        return self._write_tensors(name, tensors, track=False, changed=True)

    def link_base_shard(
        self, name: str, specs: Iterable[TensorSpec], read: Callable[[str], Buffer]
    ) -> FileEntry:
        """Give the version a shard of tensors that equal the base, stored once per exchange.

        The first writer to need this set of tensors writes it through `read(tensor name)`; later versions
        hard-link it. A stored one is read through and compared with the base's digests once per writer.
        """
        ordered = sorted(specs, key=lambda spec: spec.name)
        stored, path = self._base_object(name, ordered), self._new_path(name)
        if (known := self._writer.base_shards.get(stored)) is None:
            known = self._store_base_shard(path, stored, ordered, read)
            self._writer.base_shards[stored] = known
        else:
            self._store.share(stored, path)
        if not self._store.has_links:
            path = stored
        digest, tensor_digests = known
        self._enter_tensors(path, ordered, tensor_digests, changed=False)
        return self._record(path, digest)

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
        self._seal()
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
        """Remove what was written; harmless after a failure at any point before the commit."""
        self._store.remove_tree(self.relative_dir, first=MANIFEST_NAME, after_first=lambda: None)

    def _write_tensors(
        self, name: str, tensors: Sequence[tuple[TensorSpec, Buffer]], *, track: bool, changed: bool
    ) -> FileEntry:
        buffers = {spec.name: data for spec, data in tensors}
        plan = plan_file(spec for spec, _ in tensors)
        path = self._new_path(name)
        digests: dict[str, str] = {}
        with self._new_file(path) as file:
            file.write(plan.header)
            for slot in plan.slots:
                data = (
                    memoryview(buffers[slot.spec.name]).cast("B")
                    if slot.end > slot.begin
                    else memoryview(b"")
                )
                if len(data) != slot.end - slot.begin:
                    raise IntegrityError(
                        self._store.where(path),
                        f"the buffer for {slot.spec} has a wrong size in bytes",
                        expected=slot.end - slot.begin,
                        found=len(data),
                        action="nothing was published",
                    )
                digests[slot.spec.name] = xxh3_128(data)
                file.write(data)
        if track:
            self._enter_tensors(path, [slot.spec for slot in plan.slots], digests, changed=changed)
        return self._record(path, file.digest)

    def _base_object(self, name: str, specs: list[TensorSpec]) -> str:
        """Where `base/` keeps these tensors; the name follows from the base and the tensor names alone."""
        identity = [self._exchange.base.tensors_digest, [str(spec) for spec in specs]]
        key = sha256_hex(canonical_json(identity))[:12]
        return f"{BASE_NAME}/{name.split('.')[0]}.{key}.safetensors"

    def _store_base_shard(
        self, path: str, stored: str, specs: list[TensorSpec], read: Callable[[str], Buffer]
    ) -> tuple[FileDigest, dict[str, str]]:
        """Have the stored shard, writing it if it is not there yet; returns its and its tensors' digests.

        With links it is written inside the version first and linked into `base/` whole, so that a writer
        killed half-way leaves nothing under the stored name; an object appears whole anyway.
        """
        tensors = {spec.name: read(spec.name) for spec in specs}
        digests = {tensor: xxh3_128(data) for tensor, data in tensors.items()}
        self._check_base_digests(digests)
        digest = self._planned_digest(specs, tensors)
        if self._store.size(stored) is not None:
            self._check_stored(stored, digest.xxh3_128)
            self._store.share(stored, path)
            return digest, digests
        target = path if self._store.has_links else stored
        with self._new_file(target) as file:
            plan = plan_file(specs)
            file.write(plan.header)
            for slot in plan.slots:
                file.write(tensors[slot.spec.name])
        if target != stored:
            with suppress(FileExistsError):  # a writer that was replaced meanwhile stored the same bytes
                self._store.share(target, stored)
            self._store.seal([BASE_NAME])
        return digest, digests

    def _planned_digest(self, specs: list[TensorSpec], tensors: dict[str, Buffer]) -> FileDigest:
        """The digest of the file that these tensors make, without writing it."""
        plan, digest = plan_file(specs), FileDigest(with_sha256=self._writer.signing_key is not None)
        digest.update(plan.header)
        for slot in plan.slots:
            digest.update(tensors[slot.spec.name])
        return digest

    def _check_stored(self, stored: str, digest: str) -> None:
        with self._store.open(stored) as file:
            found = stream_xxh3_128(file)
        if found != digest:
            where = self._store.where(stored)
            raise IntegrityError(
                where, "is damaged", expected=digest, found=found, action="remove it and publish again"
            )

    def _check_base_digests(self, digests: dict[str, str]) -> None:
        """The bytes given as the base's must be the base's."""
        known = self._exchange.base_digests or {}
        for tensor, found in digests.items():
            if tensor in known and known[tensor] != found:
                where = self._exchange.base_dir or self._store.where("")
                raise IntegrityError(
                    where,
                    f"{tensor} has changed",
                    expected=known[tensor],
                    found=found,
                    action="nobody may change a base in use: restore it, then start again",
                )

    def _enter_tensors(
        self, path: str, specs: list[TensorSpec], digests: dict[str, str], *, changed: bool
    ) -> None:
        known = {entry.name for entry in self.tensors}
        for spec in specs:
            if spec.name in known:
                raise FormatError(
                    f"{self._store.where(path)}: {spec.name} was already written by this version"
                )
            self.tensors.append(
                TensorEntry(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    file=path,
                    xxh3_128=digests[spec.name],
                    changed=changed,
                )
            )

    def _new_path(self, name: str) -> str:
        path = f"{self.relative_dir}/{check_path(name)}"
        self._store.make_directory(path.rpartition("/")[0])
        return path

    def _new_file(self, path: str) -> AbstractContextManager[Upload]:
        return self._store.new_file(path, sha256=self._writer.signing_key is not None)

    def _record(self, path: str, digest: FileDigest) -> FileEntry:
        entry = FileEntry(
            path=path, size_bytes=digest.size_bytes, xxh3_128=digest.xxh3_128, sha256=digest.sha256
        )
        self.files.append(entry)
        return entry

    def _seal(self) -> None:
        directories = {entry.path.rpartition("/")[0] for entry in self.files} | {self.relative_dir}
        self._store.seal([*sorted(directories, reverse=True), VERSIONS_NAME])

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
