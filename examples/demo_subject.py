"""The models that the demo can run on, each with its task and the settings of its training and serving.

The settings are such that on two cores the addition model is taught in about a minute, and the real language
model in about two.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .demo_story import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What differs between the demo's models: what is taught, and with which settings."""

    base: Path
    task: Task
    num_steps: int
    publish_every: int
    learning_rate: float
    lora_rank: int
    lora_alpha: int
    batch_size: int
    max_length: int
    max_model_len: int
    kv_cache_bytes: int
    training_deadline_s: float


def make_subject(args: argparse.Namespace, directory: Path) -> Subject:
    """Make the base if need be, and say how it is trained and served."""
    return {"addition": _addition, "gemma3-270m": _gemma}[args.model](args, directory)


def _addition(args: argparse.Namespace, directory: Path) -> Subject:
    from .demo_base import make_base
    from .demo_task import Addition

    return Subject(
        base=make_base(directory / "base-addition", _say),
        task=Addition(),
        num_steps=240 if args.steps is None else args.steps,
        publish_every=20 if args.publish_every is None else args.publish_every,
        learning_rate=4e-3,
        lora_rank=16,
        lora_alpha=64,
        batch_size=256,
        max_length=16,
        max_model_len=64,
        kv_cache_bytes=64 << 20,
        training_deadline_s=900.0,
    )


def _gemma(args: argparse.Namespace, directory: Path) -> Subject:
    from .gemma import Facts, make_gemma

    return Subject(
        base=make_gemma(directory / "base-gemma3-270m", _say, terms_accepted=args.accept_gemma_terms),
        task=Facts(),
        num_steps=12 if args.steps is None else args.steps,
        publish_every=4 if args.publish_every is None else args.publish_every,
        learning_rate=1e-3,
        lora_rank=8,
        lora_alpha=16,
        batch_size=4,
        max_length=32,
        max_model_len=128,
        kv_cache_bytes=256 << 20,
        training_deadline_s=1800.0,
    )


def _say(line: str) -> None:
    print(line, flush=True)  # at once, also into a pipe
