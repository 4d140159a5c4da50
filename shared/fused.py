"""Which tensors the engine fuses into one module, so that a change is always shipped closed.

Must agree with vLLM's `packed_modules_mapping` and its layerwise reload: a module that gets some of its
tensors but not all keeps UNINITIALISED memory for the rest, without an error (vllm 0.32,
model_executor/model_loader/reload/layerwise.py, "Delayed processing"). Grouping too much costs bytes;
grouping too little costs correctness, so weights and biases of one module always go together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Modules of one parent that an engine module holds together, and the name of that engine module.
_FUSED_MODULES = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv",
    "query": "qkv", "key": "qkv", "value": "qkv", "qkv": "qkv", "query_key_value": "qkv",
    "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up",
    "w1": "gate_up", "w3": "gate_up", "fc1_1": "gate_up", "fc1_2": "gate_up",
    "q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a",
    "in_proj_qkvz": "in_proj", "in_proj_ba": "in_proj", "in_proj_qkv": "in_proj", "in_proj_z": "in_proj",
    "in_proj_a": "in_proj", "in_proj_b": "in_proj",
}  # fmt: skip
_EXPERTS = re.compile(r"(.*\.(?:experts|block_sparse_moe))\.(?:experts\.)?.+$")


def fused_group(name: str) -> str:
    """The group key of one checkpoint tensor name; tensors with equal keys are shipped together."""
    if match := _EXPERTS.match(name):
        return match.group(1)
    module, _, _ = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_FUSED_MODULES.get(leaf, leaf)}"


def fused_groups(names: Iterable[str]) -> dict[str, str]:
    """The group key of every name."""
    return {name: fused_group(name) for name in names}


def close_under_fusion(changed: Iterable[str], all_names: Iterable[str]) -> set[str]:
    """All of `all_names` that share a group with a changed one."""
    touched = {fused_group(name) for name in changed}
    return {name for name in all_names if fused_group(name) in touched}
