"""The demo's base: a real checkpoint directory of about 300 000 parameters, made once and kept.

A two-layer Qwen2 with a character tokenizer, trained on additions until it is right about one time in three:
good enough that a LoRA visibly lifts it, bad enough that there is something to lift.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from ..shared.errors import WeightferryError
from .demo_task import ALPHABET, ANSWER_LENGTH, Question, held_out_questions, training_questions
from .kept_base import KeptBase

EOS, PAD = "<eos>", "<pad>"
TOKENS = (PAD, EOS, *ALPHABET)
# Head size 32 is the smallest that vLLM's CPU attention takes (v1/attention/backends/cpu_attn.py, 0.32).
RECIPE: dict[str, Any] = {
    "format": 1,
    "seed": 0,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "batch_size": 256,
    "learning_rate": 3e-3,
    "enough_accuracy": 0.30,
    "max_steps": 1500,
}
CHECK_EVERY_STEPS = 10
DEADLINE_S = 240.0


def make_base(directory: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint directory below `directory`; trained first if it is not there yet."""
    kept = KeptBase(directory=directory, recipe=RECIPE)
    if kept.is_made():
        say(f"base: {kept.checkpoint} (made earlier)")
        return kept.checkpoint
    kept.clear()
    logging.disable_progress_bar()
    started = time.monotonic()
    tokenizer = make_tokenizer()
    model = _new_model()
    num_steps, accuracy = _train(model, tokenizer)
    model.bfloat16().save_pretrained(kept.checkpoint)
    tokenizer.save_pretrained(kept.checkpoint)
    kept.seal()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"base: {kept.checkpoint} ({num_parameters:,} parameters, {num_steps} steps in "
        f"{time.monotonic() - started:.0f} s, right on {accuracy:.0%} of unseen sums)"
    )
    return kept.checkpoint


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: byte-pair encoding without any merge."""
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _new_model() -> Qwen2ForCausalLM:
    torch.manual_seed(RECIPE["seed"])
    sizes = {
        name: value for name, value in RECIPE.items() if name.endswith("_size") or name.startswith("num_")
    }
    del sizes["batch_size"]
    config = Qwen2Config(
        **sizes,
        vocab_size=len(TOKENS),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOKENS.index(EOS),
        pad_token_id=TOKENS.index(PAD),
    )
    return Qwen2ForCausalLM(config)


def _train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[int, float]:
    """Train until greedy answers to unseen sums are right often enough; returns steps and accuracy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"])
    generator = torch.Generator().manual_seed(RECIPE["seed"])
    rows_NT, unseen_MT = (
        _token_rows(training_questions(), tokenizer),
        _token_rows(held_out_questions(), tokenizer),
    )
    deadline = time.monotonic() + DEADLINE_S
    for step in range(1, RECIPE["max_steps"] + 1):
        picked = torch.randint(len(rows_NT), (RECIPE["batch_size"],), generator=generator)
        _loss(model, rows_NT[picked]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (
            step % CHECK_EVERY_STEPS == 0
            and (accuracy := _accuracy(model, unseen_MT)) >= RECIPE["enough_accuracy"]
        ):
            return step, accuracy
        if time.monotonic() > deadline:
            raise WeightferryError(
                f"the demo's base was not trained within {DEADLINE_S:.0f} s (step {step}). "
                "Is the machine busy? Run the demo again; nothing was left behind."
            )
    raise WeightferryError(
        f"the demo's base did not reach {RECIPE['enough_accuracy']:.0%} in {RECIPE['max_steps']} steps"
    )


def _token_rows(questions: list[Question], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All questions with answer and end as one tensor; every row has the same length."""
    return torch.tensor(tokenizer([q.prompt + q.answer + EOS for q in questions]).input_ids)


def _loss(model: Qwen2ForCausalLM, rows_BT: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the answer and its end, not of the prompt."""
    labels_BT = rows_BT.clone()
    labels_BT[:, : -(ANSWER_LENGTH + 1)] = -100
    return model(input_ids=rows_BT, labels=labels_BT, use_cache=False).loss


def _accuracy(model: Qwen2ForCausalLM, rows_BT: torch.Tensor) -> float:
    """Share of rows whose whole answer is the greedy one.

    One pass suffices: the greedy answer equals the right one exactly if each right token is the most
    likely one after the right tokens before it.
    """
    with torch.no_grad():
        best_BT = model(input_ids=rows_BT, use_cache=False).logits.argmax(-1)
    answer = slice(-(ANSWER_LENGTH + 1), None)
    return (best_BT[:, :-1][:, answer] == rows_BT[:, 1:][:, answer]).all(1).float().mean().item()
