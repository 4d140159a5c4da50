"""Checks of a staged adapter before vLLM serves it or it is folded into the base.

vLLM itself accepts wrong shapes, dtypes, ranks and NaN without a word.

Facts: vLLM 0.32, lora/lora_model.py and peft_helper.py. Every module that the manifest names must be there
with both factors, in the shapes that the base and the rank demand, floating and finite.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from ..shared.errors import DivergedError, IncompatibleError
from ..shared.exchange import Version
from ..shared.lora_starts import RESIDUAL_STARTS, UNTRIED_STARTS
from ..shared.manifest import AdapterEntry, FileEntry, Manifest
from ..shared.tensor_files import TensorSpec, read_header
from .stager import Stager
from .worker_extension import read_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
FACTOR_DTYPES = ("BF16", "F16", "F32", "F64")
FACTOR_NAMES = ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight")


def adapter_files(manifest: Manifest) -> list[FileEntry]:
    """The files of a version's adapter directory."""
    entry = manifest.adapter
    return [file for file in manifest.files if entry and file.path.startswith(f"{entry.dir}/")]


def stage_adapter(stager: Stager, version: Version, base: dict[str, TensorSpec]) -> tuple[Path, int]:
    """Fetch a version's adapter and check it; its local directory and its tensor count."""
    entry = version.manifest.adapter
    if entry is None:
        raise IncompatibleError(
            "it holds no adapter: publish 'adapter' or 'both', or serve with --apply merged"
        )
    stager.stage(version, adapter_files(version.manifest))
    directory = stager.directory(version.number) / entry.dir.removeprefix(f"{version.dir}/")
    return directory, check_adapter(directory, entry, base)


def check_adapter(directory: Path, entry: AdapterEntry, base: dict[str, TensorSpec]) -> int:
    """The tensor count of the manifest's adapter, which the directory holds whole.

    IncompatibleError if it does not, or vLLM could not serve it; DivergedError if it is not finite.
    """
    _check_config(json.loads((directory / CONFIG_NAME).read_bytes()))
    specs = {name: slot.spec for name, slot in read_header(directory / WEIGHTS_NAME).items()}
    _check_shapes(specs, entry, base)
    _check_dtypes(specs)
    _check_finite(directory / WEIGHTS_NAME, list(specs))
    return len(specs)


def require_said_scaling(directory: Path, entry: AdapterEntry) -> None:
    """IncompatibleError unless the adapter's own settings say the scaling that the trainer's model had.

    vLLM computes it from them; a trainer may set another on the live model, which PEFT does not save.
    """
    config = json.loads((directory / CONFIG_NAME).read_bytes())
    for module in entry.modules:
        found = _said_scaling(config, module.name)
        if found is None or not math.isclose(found, module.scaling, rel_tol=1e-9):
            raise IncompatibleError(
                f"{module.name} is scaled by {module.scaling} in training, by {found} in {CONFIG_NAME}, "
                "which vLLM goes by: set it by lora_alpha or alpha_pattern, or serve with --apply merged"
            )


def _said_scaling(config: dict, name: str) -> float | None:
    """PEFT's rule, and vLLM's (lora/peft_helper.py `get_rank_and_scaling`); None if it cannot be told."""
    rank = _by_pattern(config.get("rank_pattern"), name, config.get("r"))
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha"))
    if not rank or alpha is None:
        return None
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict | None, name: str, default: float | None) -> float | None:
    """The first pattern that ends the name at a dot counts."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, default)


def _check_shapes(specs: dict[str, TensorSpec], entry: AdapterEntry, base: dict[str, TensorSpec]) -> None:
    """Both factors of every module of the manifest, and nothing else."""
    expected: dict[str, tuple[int, ...]] = {}
    for module in entry.modules:
        weight = base.get(f"{module.name}.weight")
        if weight is None or len(weight.shape) != 2:
            raise IncompatibleError(
                f"the adapter targets {module.name}, which is no linear layer of the base: use --apply merged"
            )
        size_out, size_in = weight.shape
        name_a, name_b = (factor.format(module.name) for factor in FACTOR_NAMES)
        expected |= {name_a: (module.rank, size_in), name_b: (size_out, module.rank)}
    for name in sorted(expected.keys() | specs.keys()):
        found = specs[name].shape if name in specs else None
        if expected.get(name) != found:
            raise IncompatibleError(
                f"adapter tensor {name}: shape {expected.get(name)} expected, {found} found"
            )


def _check_dtypes(specs: dict[str, TensorSpec]) -> None:
    for name, spec in sorted(specs.items()):
        if spec.dtype not in FACTOR_DTYPES:
            raise IncompatibleError(
                f"adapter tensor {name}: one of {', '.join(FACTOR_DTYPES)} expected, {spec.dtype} found"
            )


def _check_config(config: dict) -> None:
    """What vLLM's adapters cannot do, or do silently wrong, and what is more to fold than a product."""
    if config.get("peft_type") != "LORA":
        raise IncompatibleError(
            f"LoRA is served and folded, this adapter is {config.get('peft_type')}: use LoRA, "
            "or serve with --apply merged"
        )
    if config.get("bias", "none") != "none":
        raise IncompatibleError(
            "an adapter with biases is neither served nor folded: serve with --apply merged"
        )
    refused = {
        "use_dora": "DoRA",
        "lora_bias": "lora_bias",
        "modules_to_save": "modules_to_save",
        "trainable_token_indices": "trainable tokens",
        "target_parameters": "target_parameters",
        "alora_invocation_tokens": "aLoRA",
        "layer_replication": "layer_replication",
        "use_bdlora": "BD-LoRA",
        "use_qalora": "QALoRA",
        "arrow_config": "Arrow",
        "kasa_config": "KaSA",
        "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    }
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(RESIDUAL_STARTS + UNTRIED_STARTS):
        raise IncompatibleError(
            f"an adapter with init_lora_weights={init} fits what its making left of the base, not the base: "
            "train with init_lora_weights=true, or serve with --apply merged"
        )
    for key, words in refused.items():
        if config.get(key):
            raise IncompatibleError(
                f"an adapter with {words} is neither served nor folded: serve with --apply merged"
            )


def _check_finite(path: Path, names: list[str]) -> None:
    from ..shared.tensor_bytes import is_finite

    for name, tensor in read_tensors(path, names):
        if not is_finite(tensor):
            raise DivergedError(f"adapter tensor {name} is not finite: the training diverged")
