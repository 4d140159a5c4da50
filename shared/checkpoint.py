"""A Hugging Face checkpoint directory, read without torch: the only spec of names, shapes and dtypes.

Follows transformers' layout: `model.safetensors`, or shards named by `model.safetensors.index.json`.
The headers are checked against the index when it is opened; tensor bytes are read on demand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BaseCheckpointError, IntegrityError
from .tensor_files import TensorSlot, TensorSpec, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where every tensor of a checkpoint directory stands, and its config."""

    path: Path
    config: dict[str, Any]
    file_of: dict[str, str]
    slots: dict[str, TensorSlot]

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Open a local checkpoint directory; raises BaseCheckpointError that says what it lacks."""
        path = Path(directory)
        if not path.is_dir():
            raise BaseCheckpointError(
                f"{path} is not a directory; give the local directory of a Hugging Face checkpoint "
                "(`hf download ORG/NAME --local-dir DIR` makes one)"
            )
        file_of: dict[str, str] = {}
        slots: dict[str, TensorSlot] = {}
        try:
            for name in _weight_files(path):
                for tensor, slot in read_header(path / name).items():
                    if tensor in slots:
                        raise IntegrityError(
                            path / name, f"holds {tensor}, which {file_of[tensor]} holds too"
                        )
                    file_of[tensor], slots[tensor] = name, slot
            _check_index(path, file_of)
        except IntegrityError as error:
            raise BaseCheckpointError(
                f"the checkpoint cannot be used: {error.finding}; download it again"
            ) from None
        return cls(path=path, config=_read_config(path), file_of=file_of, slots=slots)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: slot.spec for name, slot in self.slots.items()}

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The raw little-endian bytes of one tensor, C order; of them, those from `begin` to `end`."""
        slot = self.slots[name]
        num_bytes = (slot.spec.size_bytes if end is None else end) - begin
        with (self.path / self.file_of[name]).open("rb") as file:
            file.seek(slot.begin + begin)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise IntegrityError(
                self.path / self.file_of[name],
                f"was cut while {name} was read",
                expected=num_bytes,
                found=len(data),
                action="nobody may change a base in use: restore it, then start again",
            )
        return data


def _weight_files(path: Path) -> list[str]:
    index = path / INDEX_NAME
    if index.exists():
        return sorted(set(_read_index(index).values()))
    if (path / SINGLE_NAME).exists():
        return [SINGLE_NAME]
    others = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".bin", ".pt", ".gguf"))
    hint = f"; it has {others[0]}: convert it with transformers' save_pretrained first" if others else ""
    raise BaseCheckpointError(f"{path} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there{hint}")


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise IntegrityError(index, "is not a safetensors index with a weight_map") from None
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise IntegrityError(index, f"names {file!r}, which is not a file of its own directory")
    return weight_map


def _check_index(path: Path, file_of: dict[str, str]) -> None:
    index = path / INDEX_NAME
    if not index.exists():
        return
    weight_map = _read_index(index)
    for tensor in sorted(weight_map.keys() | file_of.keys()):
        if weight_map.get(tensor) != file_of.get(tensor):
            raise IntegrityError(
                index,
                f"disagrees with the shards about {tensor}",
                expected=weight_map.get(tensor, "no entry"),
                found=file_of.get(tensor, "no such tensor"),
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise BaseCheckpointError(f"{path} has no config.json; it is not a whole checkpoint") from None
    except ValueError as error:
        raise BaseCheckpointError(f"{path / 'config.json'} is not JSON: {error}") from None
