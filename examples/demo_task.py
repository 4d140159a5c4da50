"""The demo's task: two-digit addition, written so that a small model can learn it, with exact answers.

`07+45=` must be continued with `250`: the sum 052, last digit first, because a carry moves that way.
All 10 000 pairs are split once: the trainer sees the training pairs, and accuracy is measured on pairs that
neither the base nor the policy was trained on. The answer is judged as text that came back over HTTP.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from .demo_client import Measurement, PolicyClient

ANSWER_LENGTH = 3
NUM_HELD_OUT = 1000
NUM_ASKED = 200
PROMPTS_PER_REQUEST = 20
SPLIT_SEED = 20
# A 95 % interval of an accuracy over 200 answers is at most 7 points wide on each side.
RISE_REQUIRED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One sum: the text that the policy sees and the only text that counts as right."""

    prompt: str
    answer: str


def question(left: int, right: int) -> Question:
    """The sum of two numbers from 0 to 99."""
    return Question(prompt=f"{left:02d}+{right:02d}=", answer=f"{left + right:0{ANSWER_LENGTH}d}"[::-1])


def training_questions() -> list[Question]:
    """What the base and the policy are trained on: 9000 sums."""
    return _split()[0]


def held_out_questions() -> list[Question]:
    """What the policy is asked: sums that were never trained on."""
    return _split()[1]


def _split() -> tuple[list[Question], list[Question]]:
    every = [question(left, right) for left in range(100) for right in range(100)]
    random.Random(SPLIT_SEED).shuffle(every)
    return every[NUM_HELD_OUT:], every[:NUM_HELD_OUT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """The task as the demo runs it: rows for the trainer, a measurement over HTTP, a verdict at the end."""

    headline: str = "accuracy"

    @property
    def introduction(self) -> str:
        example = question(7, 45)
        return (
            f"task: addition, last digit first: {example.prompt}{example.answer}; "
            f"asked are {NUM_ASKED} sums that nothing was trained on"
        )

    def write_rows(self, path: Path) -> None:
        """The trainer's file: one JSON object a line, `prompt` and `completion`."""
        rows = ({"prompt": q.prompt, "completion": q.answer} for q in training_questions())
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def measure(self, client: PolicyClient) -> Measurement | None:
        """Ask the held-out sums; None if the server moved to another version in between."""
        asked = held_out_questions()[:NUM_ASKED]
        batches = [
            asked[start : start + PROMPTS_PER_REQUEST] for start in range(0, NUM_ASKED, PROMPTS_PER_REQUEST)
        ]
        replies = client.complete_all(
            [[q.prompt for q in batch] for batch in batches], max_tokens=ANSWER_LENGTH + 1
        )
        versions = {version for reply in replies for version in reply.versions}
        if len(versions) != 1:
            return None
        texts = [text for reply in replies for text in reply.texts]
        num_right = sum(text.strip() == q.answer for text, q in zip(texts, asked, strict=True))
        score = num_right / NUM_ASKED
        return Measurement(version=versions.pop(), score=score, shown=f"{score:6.1%}", has_bar=True)

    def objection(self, base: Measurement, last: Measurement) -> str | None:
        """Why this run does not count as a success, or None."""
        if last.score >= base.score + RISE_REQUIRED:
            return None
        return (
            f"accuracy went from {base.score:.1%} to {last.score:.1%}; a rise of at least "
            f"{RISE_REQUIRED:.0%} was expected. Train for longer with --steps."
        )
