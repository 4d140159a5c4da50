"""Safetensors files without torch: strict header reading, and the layout of a file to be written.

The layout is the one `safetensors.save_file(..., metadata={"format": "pt"})` writes (tensors by falling
dtype size, then name; header padded with spaces to 8 bytes), so our files are byte-identical to it.
Format: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import IntegrityError
from .ranged_reader import RangedReader

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
# Safetensors' own dtype order, lowest first; a file holds the highest first (and so the widest items).
_DTYPE_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "F64", "I64", "U64",
)  # fmt: skip
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, safetensors dtype ("BF16", "F32", ...) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """A tensor and where its bytes stand: [begin, end) from the start of the file."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """A file to be written: its header bytes, then the slots in order, without gaps."""

    header: bytes
    slots: tuple[TensorSlot, ...]
    size_bytes: int


def plan_file(specs: Iterable[TensorSpec]) -> FilePlan:
    """Lay out a safetensors file for these tensors."""
    ordered = sorted(specs, key=lambda spec: (-_DTYPE_ORDER.index(spec.dtype), spec.name))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in ordered:
        end = offset + spec.size_bytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    slots, begin = [], len(header)
    for spec in ordered:
        slots.append(TensorSlot(spec=spec, begin=begin, end=begin + spec.size_bytes))
        begin += spec.size_bytes
    return FilePlan(header=header, slots=tuple(slots), size_bytes=begin)


def read_header(path: Path) -> dict[str, TensorSlot]:
    """All tensors of a safetensors file, checked against each other and against the file's size.

    Raises IntegrityError when the file is missing, short, has surplus bytes, or its header is not sound.
    """
    try:
        with path.open("rb") as file:
            return read_open_header(file, path.stat().st_size, path)
    except FileNotFoundError:
        raise IntegrityError(path, "is missing") from None


def read_open_header(file: BinaryIO | RangedReader, size_bytes: int, path: object) -> dict[str, TensorSlot]:
    """As `read_header`, for a file open at its start; `path` names it in errors."""
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
        raise IntegrityError(path, "is not a whole safetensors file: its header is cut or malformed")
    try:
        table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        entries = list(table.items())
    except (ValueError, AttributeError, TypeError):
        raise IntegrityError(path, "is not a safetensors file: its header is not a JSON object") from None
    slots = {name: _slot(path, name, entry, 8 + length) for name, entry in entries}
    _check_cover(path, list(slots.values()), 8 + length, size_bytes)
    return slots


def _slot(path: object, name: str, entry: dict, start: int) -> TensorSlot:
    try:
        begin, end = entry["data_offsets"]
        spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
        expected, found = spec.size_bytes, end - begin
    except (KeyError, TypeError, ValueError):
        raise IntegrityError(path, f"has a malformed header entry for {name}") from None
    if found != expected:
        raise IntegrityError(path, f"{spec} has a wrong extent", expected=expected, found=found)
    return TensorSlot(spec=spec, begin=start + begin, end=start + end)


def _check_cover(path: object, slots: list[TensorSlot], start: int, size_bytes: int) -> None:
    """The slots must follow each other without gap or overlap, up to the end of the file."""
    position = start
    for slot in sorted(slots, key=lambda slot: (slot.begin, slot.end)):
        if slot.begin != position:
            raise IntegrityError(path, f"{slot.spec.name} overlaps or leaves a gap")
        position = slot.end
    if position != size_bytes:
        raise IntegrityError(path, "has a wrong size in bytes", expected=position, found=size_bytes)
