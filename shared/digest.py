"""Digests: xxh3-128 for bulk data (integrity), SHA-256 for identities (manifests, configs)."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import xxhash

READ_BLOCK_BYTES = 4 << 20


def xxh3_128(data: bytes | bytearray | memoryview) -> str:
    """The xxh3-128 digest of a contiguous buffer, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


class Readable(Protocol):
    """What is open for reading."""

    def read(self, size: int = -1, /) -> bytes | None: ...


class FileDigest:
    """The digests of a file as it is written or read, block by block; SHA-256 where signatures need it."""

    def __init__(self, *, with_sha256: bool = False) -> None:
        self.size_bytes = 0
        self._xxh3 = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if with_sha256 else None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self.size_bytes += memoryview(data).nbytes
        self._xxh3.update(data)
        if self._sha256 is not None:
            self._sha256.update(data)

    @property
    def xxh3_128(self) -> str:
        return self._xxh3.hexdigest()

    @property
    def sha256(self) -> str | None:
        return None if self._sha256 is None else self._sha256.hexdigest()


def file_xxh3_128(path: Path) -> str:
    """The xxh3-128 digest of a whole file, read in blocks."""
    with path.open("rb") as file:
        return stream_xxh3_128(file)


def stream_xxh3_128(file: Readable) -> str:
    """The xxh3-128 digest of what is left of an open file, read in blocks."""
    return read_through(file, FileDigest()).xxh3_128


def blocks_of(file: Readable) -> Iterator[bytes | memoryview]:
    """What is left of an open file, in blocks; each holds only until the next one is asked for.

    A local file is read into the same memory again and again: new memory for every block would cost as much
    as reading, digesting and writing it. Others make their blocks themselves (ranged_reader).
    """
    if not isinstance(file, io.BufferedReader):
        while block := file.read(READ_BLOCK_BYTES):
            yield block
        return
    buffer = memoryview(bytearray(READ_BLOCK_BYTES))
    while size_bytes := file.readinto(buffer):
        yield buffer[:size_bytes]


def read_through(file: Readable, digest: FileDigest) -> FileDigest:
    """Digest what is left of an open file."""
    for block in blocks_of(file):
        digest.update(block)
    return digest


def read_part(file: Readable, size_bytes: int, *digests: FileDigest) -> None:
    """Digest the next bytes of an open file, or what there is of them."""
    while size_bytes and (block := file.read(min(size_bytes, READ_BLOCK_BYTES))):
        for digest in digests:
            digest.update(block)
        size_bytes -= len(block)


def sha256_hex(data: bytes) -> str:
    """The SHA-256 digest of some bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value in an exchange: UTF-8, sorted keys, one trailing LF."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
