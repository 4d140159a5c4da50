"""Checks of a staged adapter before vLLM serves it or it is folded into the base.

vLLM itself accepts wrong shapes, dtypes, ranks and NaN without a word.

Facts: vLLM 0.32, lora/lora_model.py and peft_helper.py. Every module that the manifest names must be there
with both factors, in the shapes that the base and the rank demand, floating and finite.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..shared.errors import DivergedError, IncompatibleError
from ..shared.exchange import Version
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
        "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    }
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
