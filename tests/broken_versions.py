"""Versions that are wrong in one way each: what is written, and what befalls it in the exchange afterwards.

Those written wrong are whole by their own manifest: each digest in it is that of the bytes that it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reissue import Content
from safetensors.torch import load, save

from weightferry.shared.tensor_files import TensorSpec

SHARD = "layer-00001.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
CONFIG, WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
UP_A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
SURPLUS = "model.layers.7.mlp.up_proj.weight"
NAN = b"\xc0\x7f"  # in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """How a version is broken before or after it is published, and the words that its refusal must have."""

    words: str
    write: Callable[[Content], Content] = lambda content: content
    harm: Callable[[Path], object] = lambda directory: None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def with_up(content: Content, change: Callable[[TensorSpec, bytes], tuple[TensorSpec, bytes]]) -> Content:
    """The content with one tensor of its last layer changed."""
    shard = [change(*tensor) if tensor[0].name == UP else tensor for tensor in content.shards[SHARD]]
    return replace(content, shards=content.shards | {SHARD: shard})


def transposed(spec: TensorSpec, data: bytes) -> tuple[TensorSpec, bytes]:
    return replace(spec, shape=spec.shape[::-1]), data


def as_float16(spec: TensorSpec, data: bytes) -> tuple[TensorSpec, bytes]:
    return replace(spec, dtype="F16"), data


def with_nan(spec: TensorSpec, data: bytes) -> tuple[TensorSpec, bytes]:
    return spec, data[: -len(NAN)] + NAN


def with_surplus(content: Content) -> Content:
    (spec, data) = next(tensor for tensor in content.shards[SHARD] if tensor[0].name == UP)
    surplus = (replace(spec, name=SURPLUS), data)
    return replace(content, shards=content.shards | {SHARD: [*content.shards[SHARD], surplus]})


def without_a_layer(content: Content) -> Content:
    shards = {name: shard for name, shard in content.shards.items() if name != SHARD}
    return replace(content, shards=shards)


def with_factors(
    content: Content, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> Content:
    """The content with other tensors in its adapter."""
    weights = save({n: t.contiguous() for n, t in change(load(content.files[WEIGHTS])).items()})
    return replace(content, files=content.files | {WEIGHTS: weights})


def with_factor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Content], Content]:
    return lambda content: with_factors(content, lambda all_: all_ | {UP_A: change(all_[UP_A])})


def nan_at_the_end(factor: torch.Tensor) -> torch.Tensor:
    factor[-1, -1] = float("nan")
    return factor


def with_huge_factors(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Finite, but their product is not when it is rounded."""
    huge = {name: torch.finfo(factors[name].dtype).max for name in (UP_A, UP_A.replace("_A.", "_B."))}
    return factors | {name: torch.full_like(factors[name], value) for name, value in huge.items()}


def with_surplus_factors(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return factors | {UP_A.replace("layers.1", "layers.7"): factors[UP_A].clone()}


def without_a_layers_factors(factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: factor for name, factor in factors.items() if "layers.1." not in name}


def with_settings(content: Content, **settings: Any) -> Content:
    """The content with other settings in its adapter."""
    config: dict[str, Any] = json.loads(content.files[CONFIG]) | settings
    return replace(content, files=content.files | {CONFIG: json.dumps(config).encode()})


def of_rank(content: Content, rank: int) -> Content:
    """The same adapter padded with zeros to another rank: sound, but more than this server's vLLM takes."""

    def pad(name: str, factor: torch.Tensor) -> torch.Tensor:
        missing = rank - min(factor.shape)
        padding = (0, 0, 0, missing) if ".lora_A." in name else (0, missing)
        return torch.nn.functional.pad(factor, padding)

    adapter = content.adapter
    assert adapter is not None
    modules = tuple(replace(module, rank=rank) for module in adapter.modules)
    alpha = adapter.modules[0].scaling * rank  # the scaling stays
    content = with_factors(content, lambda all_: {name: pad(name, factor) for name, factor in all_.items()})
    content = with_settings(content, r=rank, lora_alpha=alpha)
    return replace(content, adapter=replace(adapter, modules=modules))


MERGED = {
    "missing file": Broken(words="is missing", harm=lambda version: (version / SHARD).unlink()),
    "short file": Broken(words="wrong size in bytes", harm=lambda version: cut(version / SHARD)),
    "flipped byte": Broken(words="has other bytes", harm=lambda version: flip(version / SHARD)),
    "wrong shape": Broken(words=f"tensor {UP}", write=lambda content: with_up(content, transposed)),
    "wrong dtype": Broken(words=f"tensor {UP}", write=lambda content: with_up(content, as_float16)),
    "extra tensor": Broken(words=f"tensor {SURPLUS}: no such tensor expected", write=with_surplus),
    "missing layer": Broken(words="no such tensor found (version)", write=without_a_layer),
    "NaN": Broken(words=f"{UP} is not finite", write=lambda content: with_up(content, with_nan)),
}
ADAPTER = {
    "missing file": Broken(words="is missing", harm=lambda version: (version / WEIGHTS).unlink()),
    "short file": Broken(words="wrong size in bytes", harm=lambda version: cut(version / WEIGHTS)),
    "flipped byte": Broken(words="has other bytes", harm=lambda version: flip(version / WEIGHTS)),
    "wrong shape": Broken(words=f"tensor {UP_A}", write=with_factor(lambda factor: factor[:, :64])),
    "wrong dtype": Broken(words=f"tensor {UP_A}", write=with_factor(torch.Tensor.int)),
    "extra tensor": Broken(
        words="shape None expected", write=lambda content: with_factors(content, with_surplus_factors)
    ),
    "missing layer": Broken(
        words="None found", write=lambda content: with_factors(content, without_a_layers_factors)
    ),
    "NaN": Broken(words=f"{UP_A} is not finite", write=with_factor(nan_at_the_end)),
    "more than vLLM takes": Broken(words="max_lora_rank", write=lambda content: of_rank(content, 16)),
    "scaled otherwise in training": Broken(
        words="is scaled by", write=lambda content: with_settings(content, lora_alpha=1)
    ),
}
ONLY_VLLM_S = ("more than vLLM takes", "scaled otherwise in training")  # who folds goes by the manifest
FOLD = {case: broken for case, broken in ADAPTER.items() if case not in ONLY_VLLM_S} | {
    "merged otherwise by the trainer": Broken(
        words="when folded here", write=with_factor(lambda factor: 2 * factor)
    ),
    "infinite when merged": Broken(
        words=f"{UP} is not finite", write=lambda content: with_factors(content, with_huge_factors)
    ),
}
RANKS = {case: MERGED[case] for case in ("wrong shape", "NaN")}
CASES = {"merged": MERGED, "adapter": ADAPTER, "fold": FOLD, "2 ranks": RANKS}
