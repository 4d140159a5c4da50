"""The files of one version, as one rank writes them into the directory that only this attempt uses.

Invariants: every file is created once, under its final name, and is durable when its call returns (a joint
shard when `enter_joint_shard` does); nothing here is visible to readers, and nothing decides whether it ever
will be. A `Publication` is one of these with a commit; further ranks of the same job write beside it, and
tell it what they wrote. Follows docs/format.md [5] 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from .digest import FileDigest, canonical_json, read_part, sha256_hex, stream_xxh3_128, xxh3_128
from .durable import FilePart, create_joint
from .errors import FormatError, IntegrityError
from .exchange import BASE_NAME, Exchange
from .kill_points import reach
from .manifest import FileEntry, TensorEntry, check_path
from .store import Upload
from .tensor_files import TensorSlot, TensorSpec, plan_file

Buffer = bytes | bytearray | memoryview
# Of each stored base shard that this process knows: the digests of the file and of its tensors.
BaseShards = dict[str, tuple[FileDigest, dict[str, str]]]


class VersionFiles:
    """Writes files below `relative_dir` and enters them, and their tensors, in `files` and `tensors`.

    `base_shards` is the process's own memory of the shards that versions share; `is_signed` asks for SHA-256.
    """

    def __init__(
        self, exchange: Exchange, relative_dir: str, *, base_shards: BaseShards, is_signed: bool
    ) -> None:
        self._exchange, self._store, self.relative_dir = exchange, exchange.store, relative_dir
        self._base_shards, self._is_signed = base_shards, is_signed
        self.files: list[FileEntry] = []
        self.tensors: list[TensorEntry] = []
        self._entered: set[str] = set()
        self._num_shards = 0

    def seal(self) -> None:
        """Make the names of what was written durable."""
        directories = {entry.path.rpartition("/")[0] for entry in self.files}
        self._store.seal(sorted(directories, reverse=True))

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
        entry = self._write_tensors(name, tensors, changed=changed)
        self._count_shard()
        return entry

    def begin_joint_shard(self, name: str, specs: Iterable[TensorSpec]) -> None:
        """Make a shard that several processes of this host fill; one of them enters it when all have."""
        plan = plan_file(specs)
        create_joint(self._joint_path(name), plan.header, plan.size_bytes)

    def open_joint_shard(self, name: str) -> FilePart:
        """A joint shard, for this process to write its bytes into; durable when its `with` block ends."""
        return FilePart(self._joint_path(name))

    def enter_joint_shard(self, name: str, specs: Iterable[TensorSpec]) -> FileEntry:
        """Digest a shard and its tensors as they lie there, after every process has written its bytes."""
        plan, path, whole = plan_file(specs), self._new_path(name), FileDigest(with_sha256=self._is_signed)
        digests: dict[str, str] = {}
        with self._store.open(path) as file:
            read_part(file, len(plan.header), whole)
            for slot in plan.slots:
                read_part(file, slot.end - slot.begin, whole, tensor := FileDigest())
                digests[slot.spec.name] = tensor.xxh3_128
        if whole.size_bytes != plan.size_bytes:
            raise IntegrityError(
                self._store.where(path),
                "was cut while it was written",
                expected=plan.size_bytes,
                found=whole.size_bytes,
                action="nothing was published",
            )
        self._enter_tensors(path, [slot.spec for slot in plan.slots], digests, changed=True)
        self._count_shard()
        return self._record(path, whole)

    def write_tensor_file(
        self, name: str, specs: Iterable[TensorSpec], buffers: Iterator[Buffer]
    ) -> FileEntry:
        """Write a safetensors file that is not part of the checkpoint (an adapter's weights).

        `buffers` come in the order of `plan_file(specs)`; each is written before the next is asked for.
        """
        plan, path = plan_file(specs), self._new_path(name)
        with self._new_file(path) as file:
            file.write(plan.header)
            for slot, data in zip(plan.slots, buffers, strict=True):
                file.write(self._bytes_of_slot(path, slot, data))
        return self._record(path, file.digest)

    def link_base_shard(
        self, name: str, specs: Iterable[TensorSpec], read: Callable[[str], Buffer]
    ) -> FileEntry:
        """Give the version a shard of tensors that equal the base, stored once per exchange.

        The first writer to need this set of tensors writes it through `read(tensor name)`; later versions
        hard-link it. A stored one is read through and compared with the base's digests once per writer.
        """
        ordered = sorted(specs, key=lambda spec: spec.name)
        stored, path = self._base_object(name, ordered), self._new_path(name)
        if (known := self._base_shards.get(stored)) is None:
            known = self._store_base_shard(path, stored, ordered, read)
            self._base_shards[stored] = known
        else:
            self._store.share(stored, path)
        if not self._store.has_links:
            path = stored
        digest, tensor_digests = known
        self._enter_tensors(path, ordered, tensor_digests, changed=False)
        return self._record(path, digest)

    def _write_tensors(
        self, name: str, tensors: Sequence[tuple[TensorSpec, Buffer]], *, changed: bool
    ) -> FileEntry:
        buffers = {spec.name: data for spec, data in tensors}
        plan = plan_file(spec for spec, _ in tensors)
        path = self._new_path(name)
        digests: dict[str, str] = {}
        with self._new_file(path) as file:
            file.write(plan.header)
            for slot in plan.slots:
                data = self._bytes_of_slot(path, slot, buffers[slot.spec.name])
                digests[slot.spec.name] = xxh3_128(data)
                file.write(data)
        self._enter_tensors(path, [slot.spec for slot in plan.slots], digests, changed=changed)
        return self._record(path, file.digest)

    def _bytes_of_slot(self, path: str, slot: TensorSlot, buffer: Buffer) -> memoryview:
        data = memoryview(buffer).cast("B") if slot.end > slot.begin else memoryview(b"")
        if len(data) != slot.end - slot.begin:
            raise IntegrityError(
                self._store.where(path),
                f"the buffer for {slot.spec} has a wrong size in bytes",
                expected=slot.end - slot.begin,
                found=len(data),
                action="nothing was published",
            )
        return data

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
        plan, digest = plan_file(specs), FileDigest(with_sha256=self._is_signed)
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
        for spec in specs:
            self._enter_tensor(
                TensorEntry(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    file=path,
                    xxh3_128=digests[spec.name],
                    changed=changed,
                )
            )

    def _enter_tensor(self, entry: TensorEntry) -> None:
        if entry.name in self._entered:
            where = self._store.where(entry.file)
            raise FormatError(f"{where}: {entry.name} was already written by this version")
        self._entered.add(entry.name)
        self.tensors.append(entry)

    def _new_path(self, name: str) -> str:
        """The version's own directory is for the committing rank to make, and to remove for good."""
        path = f"{self.relative_dir}/{check_path(name)}"
        if "/" in name:
            self._store.make_directory(path.rpartition("/")[0])
        return path

    def _joint_path(self, name: str) -> Path:
        assert self._store.path is not None, "a bucket has no joint shards"
        return self._store.path / self._new_path(name)

    def _count_shard(self) -> None:
        self._num_shards += 1
        reach(f"after-shard:{self._num_shards}")

    def _new_file(self, path: str) -> AbstractContextManager[Upload]:
        return self._store.new_file(path, sha256=self._is_signed)

    def _record(self, path: str, digest: FileDigest) -> FileEntry:
        entry = FileEntry(
            path=path, size_bytes=digest.size_bytes, xxh3_128=digest.xxh3_128, sha256=digest.sha256
        )
        self.files.append(entry)
        return entry
