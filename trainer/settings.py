"""Every setting of a training job: one frozen tree, a sentence under each field.

Invariant: a `Settings` that exists is whole and of the right types; nothing checks a setting again later. The
sentences are the documentation: `--help` and docs/trainer.md are made from them. `settings_file` reads a tree
from TOML, `lora_settings` checks the table that belongs to PEFT.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ModelSettings:
    """How the base is held in memory."""

    dtype: Literal["checkpoint", "float32"] = "checkpoint"
    """The base's own dtype, or wider; what is published has the base's dtypes either way."""
    attn_implementation: str = "sdpa"
    """The attention of transformers: `sdpa`, `eager`, or one that is installed."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class DataSettings:
    """What is taught, and how many rows a step takes."""

    path: str
    """A `.jsonl` or `.parquet` file; a row has `prompt` and `completion`, or chat `messages`."""
    max_length: PositiveInt = 1024
    """Longest row in tokens; the end of a longer one is cut off, and the number of cut rows is printed."""
    batch_size: PositiveInt = 8
    """Rows a step, over all ranks together."""
    micro_batch_size: PositiveInt | None = None
    """Rows a rank takes through the model at once; not given: all its rows of the step."""
    add_bos: bool = False
    """Put the beginning-of-sequence token before every prompt, also where the tokenizer itself does not."""
    add_eos: bool = True
    """End every completion with the end-of-sequence token, so that the policy learns to stop."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class OptimizerSettings:
    """AdamW."""

    lr: PositiveFloat = 2e-4
    """Learning rate after the warm-up."""
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of an update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of the trained parameters, decoupled from the gradient."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm over all trained parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ScheduleSettings:
    """How long, and with what learning rate at each step."""

    num_steps: PositiveInt
    """Optimizer steps of the whole job."""
    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; `linear` and `cosine` end at 0."""
    num_warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises from 0."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class PublishSettings:
    """When a version is published, and what it holds."""

    every: PositiveInt = 50
    """Steps between versions; the last step, and a stop by a signal, publish too."""
    what: Literal["merged", "adapter", "both"] = "both"
    """Merged weights, the adapter, or both; `--apply merged` needs the first, the others the second."""
    at_start: bool = False
    """Publish once before the first step: the untrained adapter, which answers as the base does."""
    deadline_s: PositiveFloat = 600.0
    """Seconds that one publication may take."""
    keep: PositiveInt | None = None
    """Newest versions that stay; not given: all. Leased and pinned ones stay anyway."""
    keep_every: PositiveInt | None = None
    """Beside `keep`: of the older versions, those whose step is a multiple of this stay too."""
    signing_key: str | None = None
    """A key file that versions are signed with: 32 bytes or more of secret, or a PEM Ed25519 private key."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Settings:
    """The whole job. Relative paths start at the current directory."""

    base: str
    """Directory of the base: a Hugging Face checkpoint with safetensors and a tokenizer."""
    exchange: str
    """Where versions are published; made if it is not there."""
    output_dir: str
    """Directory for `settings.json` and `metrics.jsonl`; made if it is not there."""
    data: DataSettings
    """What is taught."""
    schedule: ScheduleSettings
    """How long."""
    seed: NonNegativeInt = 0
    """Decides the start of the adapter and the order of the rows; the same on any number of ranks."""
    start_from: str | PositiveInt | None = None
    """The adapter to go on from: a PEFT directory, or a version's number in `exchange`; else a fresh one."""
    start_from_any_base: bool = False
    """Take a directory's adapter although it names another base: the same weights at another place."""
    rank_timeout_s: PositiveFloat = 1800.0
    """Seconds that ranks wait for each other, also while rank 0 reads every byte of the base at the start."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """How the base is held in memory."""
    lora: dict[str, Any] = field(default_factory=dict)
    """The fields of `peft.LoraConfig` under their own names."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """AdamW."""
    publish: PublishSettings = field(default_factory=PublishSettings)
    """When and what to publish."""


SETTINGS = TypeAdapter(Settings)
