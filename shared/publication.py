"""One version being written: its new directory, its shards, its manifest, its commit.

Invariants: every file is created once, under its final name, in a directory that only this attempt uses;
the manifest is the last file and the log entry the last act; until then no reader can see any of it.
Called by the exporter, on the rank that writes. Follows docs/format.md [5] 3, 5 and 6.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from . import durable
from .checkpoint import INDEX_NAME
from .commit_log import now
from .digest import canonical_json, file_xxh3_128, sha256_hex, xxh3_128
from .errors import FormatError, IntegrityError
from .exchange import BASE_NAME, LATEST_NAME, Version
from .kill_points import reach
from .manifest import (
    FORMAT,
    MANIFEST_NAME,
    AdapterEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    WriterInfo,
    check_path,
    manifest_id,
)
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
        self._writer, self._exchange = writer, writer.exchange
        self.relative_dir, self.step = relative_dir, step
        self.dir = self._exchange.path / relative_dir
        self.files: list[FileEntry] = []
        self.tensors: list[TensorEntry] = []
        self._num_shards = 0
        self.dir.mkdir()
        reach("after-begin")

    def write_file(self, name: str, data: bytes) -> FileEntry:
        """Write a small file; `name` is below the version's directory, e.g. "adapter/adapter_config.json"."""
        path = self._new_path(name)
        with durable.NewFile(path) as file:
            file.write(data)
        return self._record(name, file.size_bytes, file.xxh3_128)

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
        stored = self._base_object(name, ordered)
        if (known := self._writer.base_shards.get(stored.name)) is None:
            self._store_base_shard(name, stored, ordered, read)
            known = self._writer.base_shards[stored.name]
        else:
            durable.link_or_copy(stored, self._new_path(name))
        size_bytes, digest, tensor_digests = known
        self._enter_tensors(name, ordered, tensor_digests, changed=False)
        return self._record(name, size_bytes, digest)

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
        data = self._manifest(fields).to_bytes()
        with durable.NewFile(self.dir / MANIFEST_NAME) as file:
            file.write(data)
        self._sync_directories()
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
        pointer = canonical_json({"format": FORMAT, "number": entry.number})
        self._exchange.store.replace(LATEST_NAME, pointer)
        reach("after-latest")
        self._writer.prune()
        return Version(self._exchange.store, entry)

    def _retention(self, number: int) -> dict[str, Any]:
        """The commit says at once what it leaves to deletion, so that it costs no entry of its own."""
        decided = self._writer.pruner.decide(number, self.step)
        return {} if decided is None else asdict(decided)

    def abandon(self) -> None:
        """Remove what was written; harmless after a failure at any point before the commit."""
        durable.remove_tree(self.dir)

    def _write_tensors(
        self, name: str, tensors: Sequence[tuple[TensorSpec, Buffer]], *, track: bool, changed: bool
    ) -> FileEntry:
        buffers = {spec.name: data for spec, data in tensors}
        plan = plan_file(spec for spec, _ in tensors)
        path = self._new_path(name)
        digests: dict[str, str] = {}
        with durable.NewFile(path) as file:
            file.write(plan.header)
            for slot in plan.slots:
                data = (
                    memoryview(buffers[slot.spec.name]).cast("B")
                    if slot.end > slot.begin
                    else memoryview(b"")
                )
                if len(data) != slot.end - slot.begin:
                    raise IntegrityError(
                        path, f"{slot.spec}", expected=slot.end - slot.begin, found=len(data)
                    )
                digests[slot.spec.name] = xxh3_128(data)
                file.write(data)
        if track:
            self._enter_tensors(name, [slot.spec for slot in plan.slots], digests, changed=changed)
        return self._record(name, file.size_bytes, file.xxh3_128)

    def _base_object(self, name: str, specs: list[TensorSpec]) -> Path:
        """Where `base/` keeps these tensors; the name follows from the base and the tensor names alone."""
        identity = [self._exchange.base.tensors_digest, [str(spec) for spec in specs]]
        key = sha256_hex(canonical_json(identity))[:12]
        return self._exchange.path / BASE_NAME / f"{name.split('.')[0]}.{key}.safetensors"

    def _store_base_shard(
        self, name: str, stored: Path, specs: list[TensorSpec], read: Callable[[str], Buffer]
    ) -> None:
        """Have the stored shard and its digests at hand, writing it if it is not there yet.

        It is written inside the version first and linked into `base/` whole, so that a writer killed
        half-way leaves nothing under the stored name.
        """
        tensors = {spec.name: read(spec.name) for spec in specs}
        digests = {tensor: xxh3_128(data) for tensor, data in tensors.items()}
        self._check_base_digests(digests)
        if stored.exists():
            size_bytes, digest = _planned_digest(specs, tensors)
            if (found := file_xxh3_128(stored)) != digest:
                raise IntegrityError(
                    stored, "is damaged; remove it and publish again", expected=digest, found=found
                )
            durable.link_or_copy(stored, self._new_path(name))
        else:
            written = self._write_tensors(
                name, [(s, tensors[s.name]) for s in specs], track=False, changed=False
            )
            self.files.remove(written)
            size_bytes, digest = written.size_bytes, written.xxh3_128
            durable.link_or_copy(self.dir / name, stored)
            durable.sync_directory(stored.parent)
        self._writer.base_shards[stored.name] = (size_bytes, digest, digests)

    def _check_base_digests(self, digests: dict[str, str]) -> None:
        """The bytes given as the base's must be the base's."""
        known = self._exchange.base_digests or {}
        for tensor, found in digests.items():
            if tensor in known and known[tensor] != found:
                where = self._exchange.base_dir or self._exchange.path
                raise IntegrityError(where, f"{tensor} has changed", expected=known[tensor], found=found)

    def _enter_tensors(
        self, name: str, specs: list[TensorSpec], digests: dict[str, str], *, changed: bool
    ) -> None:
        known = {entry.name for entry in self.tensors}
        for spec in specs:
            if spec.name in known:
                raise FormatError(f"{self.dir / name}: {spec.name} was already written by this version")
            self.tensors.append(
                TensorEntry(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    file=f"{self.relative_dir}/{name}",
                    xxh3_128=digests[spec.name],
                    changed=changed,
                )
            )

    def _new_path(self, name: str) -> Path:
        path = self.dir / check_path(name)
        path.parent.mkdir(exist_ok=True)
        return path

    def _record(self, name: str, size_bytes: int, digest: str) -> FileEntry:
        entry = FileEntry(path=f"{self.relative_dir}/{name}", size_bytes=size_bytes, xxh3_128=digest)
        self.files.append(entry)
        return entry

    def _sync_directories(self) -> None:
        for path in sorted({self._exchange.path / entry.path for entry in self.files}):
            if path.parent != self.dir:
                durable.sync_directory(path.parent)
        durable.sync_directory(self.dir)
        durable.sync_directory(self.dir.parent)

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


def _planned_digest(specs: list[TensorSpec], tensors: dict[str, Buffer]) -> tuple[int, str]:
    """Size and xxh3-128 of the file that these tensors make, without writing it."""
    plan = plan_file(specs)
    state = xxhash.xxh3_128(plan.header)
    for slot in plan.slots:
        state.update(tensors[slot.spec.name])
    return plan.size_bytes, state.hexdigest()


def _writer_info(world_size: int) -> WriterInfo:
    packages = {}
    for package in _PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "unknown"
    return WriterInfo(host=socket.gethostname(), pid=os.getpid(), world_size=world_size, packages=packages)
