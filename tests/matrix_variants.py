"""The adapters of the matrix: every kind that PEFT can merge, and those that must be refused.

A variant gives PEFT's own configs for one family, or none where the family has no place for it. Everything
that is trained gets seeded noise, so that nothing in the adapter is zero or the identity.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
from matrix_families import Family
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

Configs = Callable[[Family], list[PeftConfig]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`configs` of one family, the first one named "default"; empty where it does not apply.

    `publish`: what can be published. `without`: families for which PEFT itself cannot make or run it.
    `is_float32`: torch shards what it trains only in one dtype, so the base is widened. `refused`: words of
    the refusal, where the variant must be refused.
    """

    configs: Configs
    publish: str = "both"
    without: tuple[str, ...] = ()
    is_float32: bool = False
    has_float32_factors: bool = True
    refused: str = ""


def lora(family: Family, **settings: Any) -> list[PeftConfig]:
    plain: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(family.linear),
        "exclude_modules": family.skipped,
        "fan_in_fan_out": family.is_transposed,
        "task_type": "CAUSAL_LM",
    }
    return [LoraConfig(**plain | settings)]


def tuner(name: str, **settings: Any) -> Configs:
    """Another of PEFT's tuners on the linear modules; those that know no transposed ones pass over GPT-2."""

    def configs(family: Family) -> list[PeftConfig]:
        kind = getattr(peft, name)
        own: dict[str, Any] = {"target_modules": list(family.linear), "task_type": "CAUSAL_LM"}
        if family.skipped:  # not every tuner has exclude_modules
            own["target_modules"] = rf".*language_model.*\.({'|'.join(family.linear)})"
        if "fan_in_fan_out" in kind.__dataclass_fields__:
            own["fan_in_fan_out"] = family.is_transposed
        elif family.is_transposed and "target_modules" not in settings:
            return []
        return [kind(**own | settings)]

    return configs


def only(is_so: Callable[[Family], Any], configs: Configs) -> Configs:
    return lambda family: configs(family) if is_so(family) else []


def _two(family: Family) -> list[PeftConfig]:
    second = {"r": 3, "lora_alpha": 5, "target_modules": list(family.linear[1:])}
    return [*lora(family), *lora(family, **second)]


def _patterns(family: Family) -> list[PeftConfig]:
    first, second = family.linear[:2]
    return lora(family, r=8, lora_alpha=16, rank_pattern={first: 3}, alpha_pattern={second: 5})


VARIANTS: dict[str, Variant] = {
    "LoRA": Variant(configs=lora),
    "bf16 factors": Variant(configs=lora, has_float32_factors=False),
    "all-linear": Variant(configs=lambda f: lora(f, target_modules="all-linear")),
    "embedding": Variant(configs=lambda f: lora(f, target_modules=[f.embedding], fan_in_fan_out=False)),
    "lm_head": Variant(configs=lambda f: lora(f, target_modules=["lm_head"], fan_in_fan_out=False)),
    "embedding, lm_head": Variant(
        configs=lambda f: lora(f, target_modules=[f.embedding, "lm_head"], fan_in_fan_out=False)
    ),
    "rsLoRA": Variant(configs=lambda f: lora(f, use_rslora=True, r=6)),
    "DoRA": Variant(configs=lambda f: lora(f, use_dora=True)),
    "DoRA on embedding": Variant(
        configs=lambda f: lora(f, target_modules=[f.embedding], use_dora=True, fan_in_fan_out=False)
    ),
    "lora_bias": Variant(
        configs=only(lambda f: f.biased, lambda f: lora(f, lora_bias=True, target_modules=list(f.biased)))
    ),
    "patterns": Variant(configs=_patterns),
    "experts": Variant(
        configs=only(lambda f: f.experts, lambda f: lora(f, target_parameters=list(f.experts)))
    ),
    "modules_to_save": Variant(configs=lambda f: lora(f, modules_to_save=["lm_head", f.norm])),
    "tokens": Variant(configs=lambda f: lora(f, trainable_token_indices=[3, 40])),
    "some layers": Variant(configs=lambda f: lora(f, layers_to_transform=[1], task_type=None)),
    "biases": Variant(configs=only(lambda f: f.biased, lambda f: lora(f, bias="all")), is_float32=True),
    "two adapters": Variant(configs=_two, publish="merged"),
    "PiSSA": Variant(configs=lambda f: lora(f, init_lora_weights="pissa"), publish="merged"),
    "OLoRA": Variant(
        configs=lambda f: lora(f, init_lora_weights="olora"), publish="merged", without=("gpt2",)
    ),
    "MiCA": Variant(configs=lambda f: lora(f, init_lora_weights="mica")),
    "AdaLoRA": Variant(configs=tuner("AdaLoraConfig", total_step=10, init_r=4, target_r=2)),
    "BOFT": Variant(configs=tuner("BOFTConfig", boft_block_size=4), without=("gpt2",)),
    "BEFT": Variant(
        configs=only(
            lambda f: f.biased,
            lambda f: [peft.BeftConfig(target_modules=list(f.biased), task_type="CAUSAL_LM")],
        ),
        without=("gpt2",),
    ),
    "C3A": Variant(configs=tuner("C3AConfig", block_size=4)),
    "DEFT": Variant(configs=tuner("DeftConfig", r=4)),
    "DeLoRA": Variant(configs=tuner("DeloraConfig", r=4)),
    "FourierFT": Variant(configs=tuner("FourierFTConfig", n_frequency=20, scaling=30)),
    "FRoD": Variant(configs=tuner("FrodConfig")),
    "GLoRA": Variant(configs=tuner("GloraConfig", r=4)),
    "GraLoRA": Variant(configs=tuner("GraloraConfig", r=4, gralora_k=2), without=("deepseek_v3",)),
    "HiRA": Variant(configs=tuner("HiraConfig", r=4)),
    "HRA": Variant(configs=tuner("HRAConfig", r=4)),
    "IA3": Variant(configs=tuner("IA3Config", feedforward_modules=[])),
    "LNTuning": Variant(
        configs=lambda f: [
            peft.LNTuningConfig(target_modules=[f.norm.rpartition(".")[2]], task_type="CAUSAL_LM")
        ]
    ),
    "LoHa": Variant(configs=tuner("LoHaConfig", r=4)),
    "LoKr": Variant(configs=tuner("LoKrConfig", r=4)),
    "MiSS": Variant(configs=tuner("MissConfig", r=4)),
    "OFT": Variant(configs=tuner("OFTConfig", oft_block_size=4), without=("deepseek_v3", "gpt2")),
    "OSF": Variant(configs=tuner("OSFConfig")),
    "PEANuT": Variant(configs=tuner("PeanutConfig", r=4)),
    "Poly": Variant(configs=tuner("PolyConfig", r=4), refused="PEFT cannot merge"),
    "PSOFT": Variant(configs=tuner("PsoftConfig", r=4), without=("gpt2",)),
    "PVeRA": Variant(configs=tuner("PveraConfig", r=4)),
    "RandLora": Variant(configs=tuner("RandLoraConfig", r=4, randlora_alpha=20)),
    "RoAd": Variant(configs=tuner("RoadConfig", group_size=4)),
    "Shadow": Variant(
        configs=tuner("ShadowConfig", r=4),
        refused="PEFT cannot merge",
        without=("gemma3", "qwen2_5_vl", "qwen3_vl_moe"),
    ),
    "SHiRA": Variant(configs=tuner("ShiraConfig", r=4), without=("gpt2",)),
    "SuperTuning": Variant(configs=tuner("SupertuningConfig")),
    "TinyLoRA": Variant(configs=tuner("TinyLoraConfig", r=4)),
    "TrainableTokens": Variant(
        configs=lambda f: [peft.TrainableTokensConfig(token_indices=[3, 40], target_modules=[f.embedding])]
    ),
    "UniLoRA": Variant(configs=tuner("UniLoraConfig", r=4)),
    "VB-LoRA": Variant(configs=tuner("VBLoRAConfig", r=4, num_vectors=16, vector_length=4, topk=2)),
    "VeRA": Variant(configs=tuner("VeraConfig", r=4)),
    "WaveFT": Variant(configs=tuner("WaveFTConfig", n_frequency=20, scaling=5)),
    "Lily": Variant(configs=tuner("LilyConfig", r=4), refused="PEFT cannot merge"),
}


def adapt(base: Any, variant: Variant, family: Family) -> PeftModel:
    """The variant's adapters on a base, after some training."""
    configs = variant.configs(family)
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on settings that are chosen here on purpose
        model: Any = get_peft_model(base, configs[0], autocast_adapter_dtype=variant.has_float32_factors)
        for number, config in enumerate(configs[1:]):
            model.add_adapter(f"adapter-{number}", config)
    if len(configs) > 1:
        model.base_model.set_adapter(list(model.peft_config))
    move(model)
    return model


def move(model: Any, seed: int = 4) -> None:
    """Add seeded noise to everything that is trained, and to the buffers that training moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.add_(0.25)
