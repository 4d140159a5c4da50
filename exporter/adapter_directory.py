"""The adapter directory of a version: byte for byte what PEFT's save_pretrained writes in one process.

Gathered tensor by tensor, so that one of them lives at a time beside the copies that rank 0 keeps. PEFT 0.21
selects the keys by live module names and finds none below FSDP1 or checkpoint wrappers, silently: an empty
result is an error here.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict

from ..shared.digest import sha256_hex
from ..shared.errors import UnsupportedError
from ..shared.manifest import AdapterEntry, AdapterModule
from ..shared.publication import Publication
from ..shared.tensor_bytes import bytes_of, spec_of
from .layer_clone import gather
from .model_walk import base_model

ADAPTER_DIR = "adapter"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"


def gather_adapter(model: PeftModel, adapter: str, *, keep: bool) -> dict[str, torch.Tensor]:
    """PEFT's state dict of one adapter, whole; collective. `keep` is false where nothing is written."""
    state = get_peft_model_state_dict(model, adapter_name=adapter)
    if not state:
        raise UnsupportedError(
            f"PEFT finds no tensor of adapter {adapter!r} in this model: it is wrapped unknown"
        )
    gathered = {}
    for name in sorted(state):
        whole = gather(state[name])
        if 0 in whole.shape:
            raise UnsupportedError(f"adapter tensor {name} has no elements: {tuple(whole.shape)}")
        if keep:
            gathered[name] = whole.cpu().clone()
    return gathered


def write_adapter(
    publication: Publication, model: PeftModel, adapter: str, tensors: dict[str, torch.Tensor], base_name: str
) -> AdapterEntry:
    """Write weights and config below `adapter/`; returns the manifest's entry."""
    pairs = [(spec_of(name, tensor), bytes_of(tensor)) for name, tensor in tensors.items()]
    publication.write_tensor_file(f"{ADAPTER_DIR}/{WEIGHTS_NAME}", pairs)
    config = config_bytes(model, adapter, base_name)
    publication.write_file(f"{ADAPTER_DIR}/{CONFIG_NAME}", config)
    return AdapterEntry(
        dir=f"{publication.relative_dir}/{ADAPTER_DIR}",
        config_sha256=sha256_hex(config),
        modules=tuple(adapter_modules(model, adapter)),
    )


def config_bytes(model: PeftModel, adapter: str, base_name: str) -> bytes:
    """adapter_config.json as PEFT writes it, its base always named."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or base_name
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return (Path(directory) / CONFIG_NAME).read_bytes()


def adapter_modules(model: PeftModel, adapter: str) -> list[AdapterModule]:
    """Every adapted module with its rank and scaling, under its name in the base model."""
    modules = []
    for name, module in base_model(model).named_modules():
        scaling, rank = getattr(module, "scaling", {}), getattr(module, "r", {})
        if isinstance(scaling, dict) and isinstance(rank, dict) and adapter in scaling and adapter in rank:
            clean = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
            modules.append(AdapterModule(name=clean, rank=rank[adapter], scaling=float(scaling[adapter])))
    return sorted(modules, key=lambda module: module.name)
