"""The demo's base: a real checkpoint directory of about 300 000 parameters, made once and kept.

A two-layer Qwen2 with one token a byte, trained on additions until it is right about one time in three:
good enough that a LoRA visibly lifts it, bad enough that there is something to lift.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from ..shared.errors import WeightferryError
from .demo_task import ANSWER_LENGTH, Question, held_out_questions, training_questions
from .kept_base import KeptBase

EOS, PAD = "<eos>", "<pad>"
TOKENS = (PAD, EOS, *sorted(ByteLevel.alphabet()))
# Head size 32 is the smallest that vLLM's CPU attention takes (v1/attention/backends/cpu_attn.py, 0.32).
RECIPE: dict[str, Any] = {
    "format": 1,
    "seed": 0,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,  # so small a model sits long on a plateau with the usual 0.02
    "batch_size": 256,
    "learning_rate": 3e-3,
    "num_warmup_steps": 20,
    "adam_beta2": 0.98,
    "enough_accuracy": 0.30,
    "max_steps": 1500,
}
ARCHITECTURE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "initializer_range",
)
CHECK_EVERY_STEPS = 10
DEADLINE_S = 600.0


def make_base(directory: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint directory below `directory`; trained first if it is not there yet."""
    kept = KeptBase(directory=directory, recipe=RECIPE)
    if kept.is_made():
        say(f"base: {kept.checkpoint} (made earlier)")
        return kept.checkpoint
    say("base: training a small model, once (under a minute)")
    kept.clear()
    logging.disable_progress_bar()
    started = time.monotonic()
    tokenizer = make_tokenizer()
    model = _new_model()
    with _one_thread():
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


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a byte: byte-pair encoding without any merge."""
    # For a Qwen2 checkpoint, AutoTokenizer (transformers 5.19) takes Qwen2's own class, whatever was saved.
    return Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(TOKENS)},
        merges=[],
        eos_token=EOS,
        pad_token=PAD,
        unk_token=EOS,  # never used: every byte is a token
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The model is too small to gain from threads, and on a busy machine they would mostly wait in a spin."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _new_model() -> Qwen2ForCausalLM:
    torch.manual_seed(RECIPE["seed"])
    config = Qwen2Config(
        **{name: RECIPE[name] for name in ARCHITECTURE},
        vocab_size=len(TOKENS),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOKENS.index(EOS),
        pad_token_id=TOKENS.index(PAD),
    )
    return Qwen2ForCausalLM(config)


def _train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> tuple[int, float]:
    """Train until greedy answers to unseen sums are right often enough; returns steps and accuracy."""
    unseen_MT = _token_rows(held_out_questions(), tokenizer)
    enough, deadline = RECIPE["enough_accuracy"], time.monotonic() + DEADLINE_S
    for step in _train_steps(model, _token_rows(training_questions(), tokenizer)):
        if step % CHECK_EVERY_STEPS == 0 and (accuracy := _accuracy(model, unseen_MT)) >= enough:
            return step, accuracy
        if time.monotonic() > deadline:
            raise WeightferryError(
                f"the demo's base was not trained within {DEADLINE_S:.0f} s (step {step}). "
                "The machine is too busy; run the demo again when it is quieter."
            )
    raise WeightferryError(f"the demo's base did not reach {enough:.0%} in {RECIPE['max_steps']} steps")


def _train_steps(model: Qwen2ForCausalLM, rows_NT: torch.Tensor) -> Iterator[int]:
    """AdamW with a short warm-up; yields the number of each step when it is done."""
    betas, num_warmup = (0.9, RECIPE["adam_beta2"]), RECIPE["num_warmup_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"], betas=betas)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / num_warmup, total_iters=num_warmup)
    generator = torch.Generator().manual_seed(RECIPE["seed"])
    for step in range(1, RECIPE["max_steps"] + 1):
        picked = torch.randint(len(rows_NT), (RECIPE["batch_size"],), generator=generator)
        _loss(model, rows_NT[picked]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step


def _token_rows(questions: list[Question], tokenizer: Qwen2Tokenizer) -> torch.Tensor:
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
