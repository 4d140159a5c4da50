"""Digests: xxh3-128 for bulk data (integrity), SHA-256 for identities (manifests, configs)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

READ_BLOCK_BYTES = 8 << 20


def xxh3_128(data: bytes | bytearray | memoryview) -> str:
    """The xxh3-128 digest of a contiguous buffer, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def file_xxh3_128(path: Path) -> str:
    """The xxh3-128 digest of a whole file, read in blocks."""
    with path.open("rb") as file:
        return stream_xxh3_128(file)


def stream_xxh3_128(file: BinaryIO) -> str:
    """The xxh3-128 digest of what is left of an open file, read in blocks."""
    state = xxhash.xxh3_128()
    while block := file.read(READ_BLOCK_BYTES):
        state.update(block)
    return state.hexdigest()


def sha256_hex(data: bytes) -> str:
    """The SHA-256 digest of some bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value in an exchange: UTF-8, sorted keys, one trailing LF."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
