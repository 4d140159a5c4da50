"""The `[lora]` table: the fields of PEFT's LoraConfig under PEFT's own names and types.

Invariant: what comes out is a LoraConfig that PEFT itself accepted and that leaves the base's weights as they
are, for every server holds the same base. Follows peft 0.21 `tuners/lora/config.py`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_type_hints

from peft import LoraConfig, TaskType
from pydantic import TypeAdapter, ValidationError

from ..shared.errors import ConfigError, UnsupportedError
from .settings_file import did_you_mean

# PEFT writes these itself, or they describe another kind of task or launcher.
_NOT_FOR_USERS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_config", "megatron_core",
    "peft_type", "peft_version", "revision", "runtime_config", "task_type",
}  # fmt: skip
# These need Python objects or a pass over data, change how the layers of the base are laid out, or (tied
# factors) make views that FSDP2 cannot shard.
_NOT_FROM_A_FILE = {
    "alora_invocation_tokens", "arrow_config", "corda_config", "ensure_weight_tying", "eva_config",
    "kasa_config", "layer_replication", "loftq_config", "lora_ga_config", "monteclora_config",
    "qalora_group_size", "use_bdlora", "use_qalora", "velora_config",
}  # fmt: skip
# The other starts (pissa, olora, corda, loftq, ...) take a part out of the base's weights.
_STARTS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "mica")


def lora_config(table: dict[str, Any]) -> LoraConfig:
    """The LoraConfig of a `[lora]` table; ConfigError or UnsupportedError names the field."""
    types = get_type_hints(LoraConfig)
    for name, value in table.items():
        _check_name(name)
        if name == "init_lora_weights":
            _check_start(value)
        else:
            _check_type(name, value, types[name])
    try:
        return LoraConfig(**table, task_type=TaskType.CAUSAL_LM)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora: PEFT refuses these settings: {error}") from None


def names() -> list[str]:
    """Every field that a settings file may set."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    return sorted(fields - _NOT_FOR_USERS - _NOT_FROM_A_FILE)


def _check_name(name: str) -> None:
    if name in _NOT_FROM_A_FILE:
        raise UnsupportedError(f"lora.{name} is not supported by the trainer; take it out")
    if name not in names():
        hint = did_you_mean(name, names())
        raise ConfigError(f"lora.{name} is no field of peft.LoraConfig{hint}; take it out or rename it")


def _check_type(name: str, value: Any, expected: Any) -> None:
    try:
        TypeAdapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        told = " or ".join(
            dict.fromkeys(
                problem["msg"].removeprefix("Input should be ") for problem in error.errors(include_url=False)
            )
        )
        raise ConfigError(f"lora.{name}: {told} expected, {json.dumps(value, default=str)} found") from None


def _check_start(value: Any) -> None:
    # `1 == True` in Python; a TOML 1 is no Boolean
    if not isinstance(value, bool | str) or value not in _STARTS_THAT_KEEP_THE_BASE:
        expected = ", ".join(json.dumps(start) for start in _STARTS_THAT_KEEP_THE_BASE)
        raise UnsupportedError(
            f"lora.init_lora_weights: one of {expected} expected, {json.dumps(value, default=str)} found; "
            "other starts change the base's weights, which every server shares"
        )
