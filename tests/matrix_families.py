"""The model families of the matrix: tiny random models with every feature of names, layouts and dtypes.

Each is saved as a checkpoint directory first, in bfloat16 but for what its class keeps in float32, and loaded
from there: what from_config alone would give has other names, and no mixed dtypes. Sizes are odd where a
family takes odd ones, so that ranks get uneven rows.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
IDS = torch.arange(3, 35).reshape(2, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model class with its config, and its modules by what they are to an adapter.

    `linear`: modules of every decoder layer, `biased` those of them with a bias; `experts`: fused
    parameters; `norm`: a norm that can be trained whole; `skipped`: a pattern of towers left alone;
    `float32`: a pattern of tensors that the checkpoint has in float32 beside bfloat16.
    """

    kind: str
    config: Callable[[], Any]
    linear: tuple[str, ...] = ("q_proj", "v_proj", "o_proj")
    biased: tuple[str, ...] = ()
    square: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    embedding: str = "embed_tokens"
    norm: str = "model.norm"
    is_tied: bool = False
    is_transposed: bool = False
    skipped: str | None = None
    float32: str = ""

    @property
    def is_float32(self) -> bool:
        """Then it is trained in float32, too: a narrower model would not hold the base."""
        return bool(self.float32)

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.kind)


def _text(**more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 97,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    return sizes | more


# Every expert answers every token: which ones do would jump at a rounding, and the logits with it.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}


def _without_head_dim(**more: Any) -> dict[str, Any]:
    return {key: value for key, value in _text(**more).items() if key != "head_dim"}


def _moe(**more: Any) -> dict[str, Any]:
    return _text(moe_intermediate_size=32, **_EXPERTS, **more)


def _vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        **more,
    }


def _mrope(kind: str) -> dict[str, Any]:
    return {kind: "default" if kind == "rope_type" else "mrope", "mrope_section": [2, 3, 3]}


def _deepseek() -> Any:
    sizes: dict[str, Any] = _text(
        num_key_value_heads=4, head_dim=8, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=4
    )
    heads: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    return transformers.DeepseekV3Config(**sizes, **heads, n_group=2, topk_group=2, first_k_dense_replace=1)


def _qwen3_next() -> Any:
    linear: dict[str, Any] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
    }
    return transformers.Qwen3NextConfig(
        **_moe(**linear, initializer_range=0.05), layer_types=["linear_attention", "full_attention"]
    )


def _gemma3() -> Any:
    vision: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    return transformers.Gemma3Config(
        text_config=_text(query_pre_attn_scalar=16),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )


def _qwen2_5_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(
        text_config=_without_head_dim(rope_scaling=_mrope("type")),
        vision_config=_vision(fullatt_block_indexes=[1]),
    )


def _qwen3_vl_moe() -> Any:
    return transformers.Qwen3VLMoeConfig(
        text_config=_moe(rope_scaling=_mrope("rope_type")),
        vision_config=_vision(deepstack_visual_indexes=[0], num_position_embeddings=16),
    )


_QKV = ("q_proj", "k_proj", "v_proj")
FAMILIES: dict[str, Family] = {
    "llama": Family(kind="LlamaForCausalLM", config=lambda: transformers.LlamaConfig(**_text())),
    "llama, fp32 norms": Family(
        kind="LlamaForCausalLM", config=lambda: transformers.LlamaConfig(**_text()), float32="norm"
    ),
    "qwen2": Family(
        kind="Qwen2ForCausalLM",
        config=lambda: transformers.Qwen2Config(
            **_without_head_dim(hidden_size=60, intermediate_size=100, num_attention_heads=6)
        ),
        linear=("q_proj", "v_proj", "o_proj", "down_proj"),
        biased=("q_proj", "v_proj"),
    ),
    "qwen2 tied": Family(
        kind="Qwen2ForCausalLM",
        config=lambda: transformers.Qwen2Config(**_without_head_dim(tie_word_embeddings=True)),
        biased=("q_proj", "v_proj"),
        is_tied=True,
    ),
    "qwen3_moe": Family(
        kind="Qwen3MoeForCausalLM", config=lambda: transformers.Qwen3MoeConfig(**_moe()), experts=EXPERTS
    ),
    "mixtral": Family(
        kind="MixtralForCausalLM",
        config=lambda: transformers.MixtralConfig(**_text(**_LOCAL_EXPERTS)),
        experts=EXPERTS,
    ),
    "gpt_oss": Family(
        kind="GptOssForCausalLM",
        config=lambda: transformers.GptOssConfig(**_text(**_LOCAL_EXPERTS)),
        biased=("q_proj", "v_proj", "o_proj"),
        experts=EXPERTS,
    ),
    "deepseek_v3": Family(
        kind="DeepseekV3ForCausalLM",
        config=_deepseek,
        linear=("q_b_proj", "kv_b_proj", "o_proj"),
        experts=EXPERTS,
    ),
    "gemma3 text": Family(
        kind="Gemma3ForCausalLM",
        config=lambda: transformers.Gemma3TextConfig(
            **_text(query_pre_attn_scalar=16, tie_word_embeddings=True)
        ),
        is_tied=True,
    ),
    "gemma3": Family(
        kind="Gemma3ForConditionalGeneration",
        config=_gemma3,
        norm="language_model.norm",
        is_tied=True,
        skipped=r".*vision.*",
    ),
    "phi3": Family(
        kind="Phi3ForCausalLM",
        config=lambda: transformers.Phi3Config(**_without_head_dim()),
        linear=("qkv_proj", "gate_up_proj"),
    ),
    "olmoe": Family(
        kind="OlmoeForCausalLM",
        config=lambda: transformers.OlmoeConfig(**_without_head_dim(**_EXPERTS)),
        experts=EXPERTS,
    ),
    "qwen3_next": Family(
        kind="Qwen3NextForCausalLM",
        config=_qwen3_next,
        linear=("q_proj", "v_proj", "in_proj_qkvz", "out_proj"),
        experts=EXPERTS,
    ),
    "qwen2_5_vl": Family(
        kind="Qwen2_5_VLForConditionalGeneration",
        config=_qwen2_5_vl,
        biased=("q_proj", "v_proj"),
        norm="language_model.norm",
        skipped=r".*visual.*",
    ),
    "qwen3_vl_moe": Family(
        kind="Qwen3VLMoeForConditionalGeneration",
        config=_qwen3_vl_moe,
        experts=EXPERTS,
        norm="language_model.norm",
        skipped=r".*visual.*",
    ),
    "gpt2": Family(
        kind="GPT2LMHeadModel",
        config=lambda: transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=64, vocab_size=97, n_positions=64, bos_token_id=0
        ),
        linear=("c_attn", "c_proj"),
        biased=("c_attn", "c_proj"),
        embedding="wte",
        norm="transformer.ln_f",
        is_tied=True,
        is_transposed=True,
    ),
}


def save_base(name: str, path: Path) -> Path:
    """The family's checkpoint: random weights, rounded as from_pretrained rounds them."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model: Any = family.model_class(family.config())
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.05)  # biases and norms start as constants
        model.save_pretrained(directory)
        load(name, Path(directory), torch.bfloat16).save_pretrained(path)
    if family.float32:
        _keep_in_float32(path / "model.safetensors", model, re.compile(family.float32))
    return path


def _keep_in_float32(file: Path, model: PreTrainedModel, kept: re.Pattern[str]) -> None:
    wide = {name: t.detach().clone() for name, t in model.state_dict().items() if kept.search(name)}
    save_file(load_file(file) | wide, file, metadata={"format": "pt"})


def load(name: str, path: Path, dtype: torch.dtype) -> Any:
    return FAMILIES[name].model_class.from_pretrained(path, dtype=dtype)
