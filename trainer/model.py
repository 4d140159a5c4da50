"""The policy in memory: the base, PEFT's LoRA on it, sharded over the ranks with FSDP2.

Order matters and is fixed here: load, LoRA, checkpointing, shard (a LoRA put on sharded weights has the wrong
shapes; torch 2.13, peft 0.21). The adapter starts from one seed on the CPU before anything is sharded, so it
is the same on any number of ranks and any device. Every rank holds the whole base once while it loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..shared.checkpoint import Checkpoint
from ..shared.errors import ConfigError, UnsupportedError
from .settings import ModelSettings

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def load_policy(base: Checkpoint, settings: ModelSettings, lora: LoraConfig, *, seed: int) -> PeftModel:
    """The base with a fresh adapter, whole, on the CPU, in training mode."""
    model = _load_base(base, settings)
    torch.manual_seed(seed)
    try:
        policy = get_peft_model(model, lora)
    except ValueError as error:  # e.g. target modules that the base does not have
        raise ConfigError(f"lora: PEFT cannot put this adapter on {base.path}: {error}") from None
    if not isinstance(policy, PeftModel):
        raise UnsupportedError(f"lora: PEFT made a {type(policy).__name__} of {base.path}, not a PeftModel")
    _order_names(policy)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def shard_policy(policy: PeftModel, mesh: DeviceMesh) -> PeftModel:
    """Shard in place: separately trained modules first, then each decoder layer, then the rest."""
    units: list[list[nn.Module]] = [
        *_separate_modules(policy),
        *([layer] for layer in _decoder_layers(policy.get_base_model())),
        [policy],
    ]
    _check_dtypes(units)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return policy


def trained_parameters(policy: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def _load_base(base: Checkpoint, settings: ModelSettings) -> PreTrainedModel:
    if "quantization_config" in base.config:
        raise UnsupportedError(
            f"{base.path} is quantised, and a merge would have to quantise again; "
            "give the checkpoint that it was made from"
        )
    logging.disable_progress_bar()
    dtype = torch.float32 if settings.dtype == "float32" else _main_dtype(base)
    try:
        return AutoModelForCausalLM.from_pretrained(
            base.path,
            dtype=dtype,  # at load time: `.to(dtype)` would also round the rotary frequencies
            attn_implementation=settings.attn_implementation,
            local_files_only=True,
        )
    except (ValueError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UnsupportedError(f"transformers cannot load {base.path} for training: {first_line}") from None


def _order_names(policy: PeftModel) -> None:
    """PEFT saves sets of names in an order that each process draws anew; versions must not show it."""
    for config in policy.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))


def _main_dtype(base: Checkpoint) -> torch.dtype:
    """What most of the checkpoint's elements are held in."""
    elements = Counter[str]()
    for spec in base.specs.values():
        if spec.dtype in _DTYPES:
            elements[spec.dtype] += prod(spec.shape)
    if not elements:
        raise UnsupportedError(f"{base.path} has no weights in {', '.join(_DTYPES)}; give such a checkpoint")
    return _DTYPES[elements.most_common(1)[0][0]]


def _decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that transformers itself never splits over devices."""
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    return (module for module in model.modules() if type(module).__name__ in blocks)


def _separate_modules(policy: nn.Module) -> list[list[nn.Module]]:
    """What PEFT trains whole (modules_to_save, tokens): in the base's dtype, beside float32 LoRA factors.

    Tied ones share parameters, which FSDP2 manages in one unit only.
    """
    modules: list[nn.Module] = [m for m in policy.modules() if isinstance(m, AuxiliaryTrainingWrapper)]
    held = [parameter for module in modules for parameter in module.parameters()]
    is_tied = len(held) != len(set(held))
    return [modules] if is_tied else [[module] for module in modules]


def _check_dtypes(units: list[list[nn.Module]]) -> None:
    """FSDP2 wants one dtype among the trained parameters of a unit (torch 2.13, _fsdp_param_group.py)."""
    managed: set[nn.Parameter] = set()
    for unit in units:
        trained = [parameter for module in unit for parameter in trained_parameters(module)]
        own = [parameter for parameter in trained if parameter not in managed]
        managed.update(own)
        if len(dtypes := {str(parameter.dtype) for parameter in own}) > 1:
            raise UnsupportedError(
                f"a {type(unit[0]).__name__} has trained parameters in {' and '.join(sorted(dtypes))}, which "
                'FSDP cannot shard together; set model.dtype = "float32", or train no biases of the base'
            )
