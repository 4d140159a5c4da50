"""Tiny real models with a real tokenizer, saved as checkpoint directories, for tests that need torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = [chr(code) for code in range(32, 127)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; no token is added by itself."""
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_layers: int = 2,
) -> Path:
    """A small Qwen2 (hidden 128, head size 32, the least that vLLM's CPU attention takes)."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,  # sharp enough that greedy answers differ between versions
    )
    model = Qwen2ForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_odd_model(directory: Path) -> Path:
    """A Qwen2 whose sizes (60, 100, 97) leave ranks uneven rows, and some of four ranks none of a bias."""
    return _save(
        Qwen2ForCausalLM,
        Qwen2Config(**_sizes(hidden_size=60, intermediate_size=100, vocab_size=97)),
        directory,
    )


def make_tiny_moe(directory: Path) -> Path:
    """A Qwen3-MoE of 4 experts, top 2: fused in memory, one tensor an expert and projection on disk."""
    moe = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_sizes(hidden_size=64, **moe)), directory)


def make_tiny_gpt_oss(directory: Path) -> Path:
    """A GPT-OSS of 4 experts, top 2: fused in memory and on disk, with biases and attention sinks."""
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    sizes = _sizes(hidden_size=64, intermediate_size=48, sliding_window=16, **moe)
    return _save(GptOssForCausalLM, GptOssConfig(**sizes), directory)


_SIZES: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # sharp enough that greedy answers differ between versions
}


def _sizes(**changes: int) -> dict[str, Any]:
    return _SIZES | changes


def _save(kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    kind(config).bfloat16().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
