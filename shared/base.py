"""The identity of a base checkpoint: what trainer, exchange and server must have in common.

Follows docs/format.md [3]. Two bases are the same when every tensor has the same name, dtype, shape and
bytes; the directory's name, its sharding and its tokenizer do not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .checkpoint import Checkpoint
from .digest import canonical_json, sha256_hex, xxh3_128
from .errors import FormatError
from .tensor_files import TensorSpec

# Written by the software that saved the config, not part of what the model is.
_CONFIG_NOISE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseIdentity:
    """`tensors_digest` covers (name, dtype, shape, xxh3-128) of every tensor and alone decides equality."""

    model: str
    revision: str | None
    config_digest: str
    tensors_digest: str
    num_tensors: int
    size_bytes: int

    def is_same_as(self, other: BaseIdentity) -> bool:
        return self.tensors_digest == other.tensors_digest

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> BaseIdentity:
        try:
            return cls(**value)
        except TypeError as error:
            raise FormatError(f"a base identity is malformed: {error}") from None

    def __str__(self) -> str:
        return f"{self.model} ({self.num_tensors} tensors, digest {self.tensors_digest[:12]})"


def identify_base(
    checkpoint: Checkpoint, *, model: str | None = None, revision: str | None = None
) -> tuple[BaseIdentity, dict[str, str]]:
    """The identity of a checkpoint and the xxh3-128 of each tensor; reads every byte once.

    `model` is the id as the user named it (default: the directory).
    """
    digests = {name: xxh3_128(checkpoint.read_bytes(name)) for name in sorted(checkpoint.slots)}
    identity = BaseIdentity(
        model=model or str(checkpoint.path),
        revision=revision,
        config_digest=config_digest(checkpoint.config),
        tensors_digest=tensors_digest(checkpoint.specs, digests),
        num_tensors=len(digests),
        size_bytes=sum(spec.size_bytes for spec in checkpoint.specs.values()),
    )
    return identity, digests


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 over the config without what the saving software adds."""
    return sha256_hex(canonical_json({key: config[key] for key in config if key not in _CONFIG_NOISE}))


def tensors_digest(specs: dict[str, TensorSpec], digests: dict[str, str]) -> str:
    """xxh3-128 over the sorted (name, dtype, shape, xxh3-128) rows of a tensor set."""
    rows = [[name, specs[name].dtype, list(specs[name].shape), digests[name]] for name in sorted(digests)]
    return xxh3_128(canonical_json(rows))
