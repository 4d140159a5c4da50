"""The manifest of a version: every file and tensor with its digest, and where it came from.

Follows docs/format.md [2]. A manifest is frozen data with one byte form; reading one checks its format
number, its fields and its paths before anything else looks at it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .base import BaseIdentity
from .digest import FileDigest, canonical_json, sha256_hex
from .errors import FormatError, IntegrityError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
PUBLISHED_KINDS = ("merged", "adapter", "both")
_DAMAGED = "it is damaged: run `weightferry verify` to see what else is, and what to do"
_SAFE_PATH = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*\Z")
_DIGEST = re.compile(r"[0-9a-f]{32}\Z")


def check_path(path: object) -> str:
    """A relative path below the exchange, of `[A-Za-z0-9._/-]`, without `..`; else FormatError."""
    if not isinstance(path, str) or not _SAFE_PATH.match(path) or {".", ".."} & set(path.split("/")):
        raise FormatError(
            f"the path {path!r} is refused: a path must be relative, below the exchange, of [A-Za-z0-9._/-], "
            "without .."
        )
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file: its path below the exchange, its size and its digests; SHA-256 in signed manifests."""

    path: str
    size_bytes: int
    xxh3_128: str
    sha256: str | None = None

    @property
    def digest(self) -> FileDigest:
        """An empty digest of the kinds that this entry has, for reading the file through."""
        return FileDigest(with_sha256=self.sha256 is not None)

    def check(self, found: FileDigest, where: object) -> None:
        """Raise IntegrityError unless a file that was read through is this one."""
        for what, expected, is_now in (
            ("has a wrong size in bytes", self.size_bytes, found.size_bytes),
            ("has other bytes", self.xxh3_128, found.xxh3_128),
            ("has other bytes", self.sha256, found.sha256),
        ):
            if expected != is_now:
                raise IntegrityError(where, what, expected=expected, found=is_now)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor and the file (path below the exchange) that holds it.

    `changed`: this version carries the tensor in a shard of its own, because an adapter's target or
    something fused with it is in its group. Unchanged tensors equal the base bit for bit.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    xxh3_128: str
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModule:
    """One adapted module: its name in the base model, its rank, and PEFT's scaling for it."""

    name: str
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """The PEFT directory of a version (path below the exchange) and what it adapts."""

    dir: str
    config_sha256: str
    modules: tuple[AdapterModule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInfo:
    """Who wrote a version."""

    host: str
    pid: int
    world_size: int
    packages: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a reader may rely on about one version."""

    exchange_id: str
    run_id: str
    epoch: int
    step: int
    created: str
    writer: WriterInfo
    base: BaseIdentity
    published: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = ()
    adapter: AdapterEntry | None = None
    merge: dict[str, str] | None = None
    fidelity: dict[str, Any] | None = None
    probe: dict[str, Any] | None = None
    tied: tuple[tuple[str, str], ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    signature: dict[str, str] | None = None
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def changed_bytes(self) -> int:
        """Bytes of the files that this version does not share with the base."""
        shared = {entry.file for entry in self.tensors if not entry.changed}
        return sum(entry.size_bytes for entry in self.files if entry.path not in shared)

    def to_bytes(self) -> bytes:
        return canonical_json(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: object) -> Manifest:
        """Parse and check a manifest; `where` names it in errors."""
        value = read_json_object(data, where)
        check_format(value, where)
        try:
            manifest = _build(value)
        except (TypeError, KeyError, ValueError) as error:
            raise FormatError(f"{where} is not a manifest of format {FORMAT} ({error}); {_DAMAGED}") from None
        _check_manifest(manifest, where)
        return manifest


def manifest_id(data: bytes) -> str:
    """The identity of a manifest: SHA-256 of its bytes; the log entry repeats it."""
    return sha256_hex(data)


def read_json_object(data: bytes, where: object) -> dict[str, Any]:
    """Parse one JSON object, or raise FormatError naming the file."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise FormatError(f"{where} is not JSON ({error}); {_DAMAGED}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where} holds no JSON object; {_DAMAGED}")
    return value


def check_format(value: dict[str, Any], where: object) -> None:
    """Refuse what another format wrote, naming both numbers."""
    if value.get("format") != FORMAT:
        raise FormatError(
            f"{where} is of format {value.get('format')!r}; this weightferry reads format {FORMAT}. "
            "Use the weightferry version that wrote it, or a newer one."
        )


def _build(value: dict[str, Any]) -> Manifest:
    unknown = value.keys() - {entry.name for entry in fields(Manifest)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    adapter = value["adapter"]
    return Manifest(
        **value
        | {
            "writer": WriterInfo(**value["writer"]),
            "base": BaseIdentity.from_json(value["base"]),
            "files": tuple(FileEntry(**entry) for entry in value["files"]),
            "tensors": tuple(
                TensorEntry(**entry | {"shape": tuple(entry["shape"])}) for entry in value["tensors"]
            ),
            "adapter": adapter
            and AdapterEntry(**adapter | {"modules": tuple(AdapterModule(**m) for m in adapter["modules"])}),
            "tied": tuple((first, second) for first, second in value["tied"]),
        }
    )


def _check_manifest(manifest: Manifest, where: object) -> None:
    if manifest.published not in PUBLISHED_KINDS:
        raise FormatError(f"{where} says published={manifest.published!r}; expected one of {PUBLISHED_KINDS}")
    paths = {check_path(entry.path) for entry in manifest.files}
    if len(paths) != len(manifest.files):
        raise FormatError(f"{where} names a file twice")
    if len({entry.name for entry in manifest.tensors}) != len(manifest.tensors):
        raise FormatError(f"{where} names a tensor twice")
    for entry in manifest.tensors:
        if entry.file not in paths:
            raise FormatError(f"{where}: the file of {entry.name}, {entry.file!r}, is not among its files")
    for digest in [e.xxh3_128 for e in manifest.files] + [e.xxh3_128 for e in manifest.tensors]:
        if not isinstance(digest, str) or not _DIGEST.match(digest):
            raise FormatError(f"{where} holds {digest!r}, which is not an xxh3-128 digest")
    if manifest.adapter is not None:
        check_path(manifest.adapter.dir)
