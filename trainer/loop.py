"""The training job from settings to the last publication.

Invariant: every rank takes the same path, so that each collective meets its peers: what only one rank knows
(a stop signal, an error of rank 0) is shared before anybody acts on it. Shapes: B rows, T tokens, V
vocabulary, N counted tokens.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..exporter.adapter_loading import load_adapter, load_version_adapter
from ..exporter.publisher import Publisher
from ..shared import durable
from ..shared.checkpoint import Checkpoint
from ..shared.errors import BaseCheckpointError, ConfigError, WeightferryError
from ..shared.exchange import Exchange
from ..shared.retention import RetentionPolicy
from ..shared.signing import load_signing_key
from .batches import Batches, MicroBatch
from .dataset import check_vocabulary, load_examples
from .example import NO_LOSS
from .lora_settings import lora_config
from .metrics import PublishReport, Reporter, StepReport
from .model import load_policy, shard_policy, trained_parameters
from .optimizer import Optimizer
from .ranks import Ranks
from .settings import PublishSettings, Settings
from .stop import StopRequest

SETTINGS_NAME = "settings.json"


def train(settings: Settings, base: Checkpoint, ranks: Ranks) -> None:
    """Run the job; returns when the last version is published."""
    lora = lora_config(settings.lora)
    options = _publisher_options(settings.publish, ranks)
    output_dir = ranks.from_first(lambda: _prepare_output(settings))
    exchange = ranks.from_first(lambda: Exchange.open(settings.exchange, base=settings.base))
    batches = _load_batches(settings, base)
    policy = load_policy(base, settings.model, lora, seed=settings.seed)
    check_vocabulary(batches.examples, policy.get_input_embeddings().weight.shape[0])
    policy = shard_policy(policy, ranks.mesh())
    _start_adapter(policy, settings)
    optimizer = Optimizer(trained_parameters(policy), settings.optimizer, settings.schedule)
    torch.manual_seed(settings.seed + 1 + ranks.rank)  # dropout differs among ranks
    with (
        StopRequest() as stop,
        Reporter(output_dir, settings.schedule.num_steps) as reporter,
        Publisher(policy, exchange, **options) as publisher,
    ):
        reporter.say(_opening(settings, ranks, batches))
        Loop(settings, ranks, policy, optimizer, batches, publisher, reporter, stop).run()


def _publisher_options(settings: PublishSettings, ranks: Ranks) -> dict[str, Any]:
    """What `Publisher` is told, checked before the model is loaded."""
    RetentionPolicy(keep=settings.keep, keep_every=settings.keep_every)  # raises ConfigError
    key_file = settings.signing_key
    return {
        "publish": settings.what,
        "deadline_s": settings.deadline_s,
        "keep": settings.keep,
        "keep_every": settings.keep_every,
        "signing_key": ranks.from_first(lambda: load_signing_key(Path(key_file)) if key_file else None),
    }


class Loop:
    """Steps and publications, until the schedule's end or a request to stop."""

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        policy: PeftModel,
        optimizer: Optimizer,
        batches: Batches,
        publisher: Publisher,
        reporter: Reporter,
        stop: StopRequest,
    ) -> None:
        self._settings, self._ranks = settings, ranks
        self._policy, self._optimizer, self._batches = policy, optimizer, batches
        self._publisher, self._reporter, self._stop = publisher, reporter, stop

    def run(self) -> None:
        every, num_steps = self._settings.publish.every, self._settings.schedule.num_steps
        if self._settings.publish.at_start:
            self._publish(0, {})
        for step in range(1, num_steps + 1):
            report, is_stopped = self._step(step)
            self._reporter.step(report)
            if is_stopped or step % every == 0 or step == num_steps:
                self._publish(step, {"loss": report.loss})
            if is_stopped:
                self._reporter.say(f"stopped by a signal after step {step} of {num_steps}")
                return

    def _step(self, step: int) -> tuple[StepReport, bool]:
        """One optimizer step; also whether any rank was asked to stop."""
        start = time.monotonic()
        share = self._batches.share(step, rank=self._ranks.rank, world_size=self._ranks.world_size)
        own_loss = 0.0
        for micro_batch in share.micro_batches:
            loss = self._loss_sum(micro_batch) / share.num_loss_tokens
            (loss * self._ranks.world_size).backward()  # FSDP takes the mean of the ranks' gradients
            own_loss += loss.item()
        loss, num_stops = self._ranks.sum(own_loss, self._stop.is_requested)
        if not math.isfinite(loss):
            raise WeightferryError(
                f"the loss is {loss} at step {step}: training diverged, and nothing of it is published; "
                "lower optimizer.lr, or look at the rows of this step"
            )
        lr, grad_norm = self._optimizer.lr, self._optimizer.step()
        report = StepReport(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=share.num_tokens,
            loss_tokens=share.num_loss_tokens,
            seconds=time.monotonic() - start,
        )
        return report, num_stops > 0

    def _loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        """Cross entropy of the labelled tokens, summed, in float32."""
        device = self._ranks.device
        logits_BTV = self._policy(
            input_ids=batch.input_ids_BT.to(device),
            attention_mask=batch.attention_mask_BT.to(device),
            use_cache=False,
        ).logits
        targets_BT = batch.labels_BT[:, 1:].to(device)
        counted_BT = targets_BT != NO_LOSS
        counted_NV = logits_BTV[:, :-1][counted_BT].float()
        return functional.cross_entropy(counted_NV, targets_BT[counted_BT], reduction="sum")

    def _publish(self, step: int, metrics: dict[str, float]) -> None:
        start = time.monotonic()
        ticket = self._publisher.publish(step, metrics=metrics)
        version = ticket.wait(deadline_s=self._settings.publish.deadline_s)
        if self._ranks.is_first:
            report = PublishReport(
                step=step,
                version=version.number,
                run_id=version.run_id,
                seconds=time.monotonic() - start,
                bytes=version.manifest.changed_bytes,
            )
            self._reporter.published(report)


def _start_adapter(policy: PeftModel, settings: Settings) -> None:
    """Go on from a saved adapter, if one is asked for; collective."""
    if isinstance(settings.start_from, int):
        load_version_adapter(policy, Exchange.open(settings.exchange), settings.start_from)
    elif settings.start_from is not None:
        load_adapter(policy, settings.start_from, any_base=settings.start_from_any_base)


def _prepare_output(settings: Settings) -> Path:
    """The directory for what the job tells, with its settings in it."""
    directory = Path(settings.output_dir)
    try:
        durable.make_directory(directory)
        content = json.dumps(asdict(settings), indent=1) + "\n"
        durable.replace(directory / SETTINGS_NAME, content.encode())
    except OSError as error:
        raise ConfigError(f"output_dir: {directory} cannot be written: {error.strerror}") from None
    return directory


def _load_batches(settings: Settings, base: Checkpoint) -> Batches:
    tokenizer = _load_tokenizer(base)
    pad_id = tokenizer.pad_token_id
    return Batches(
        examples=load_examples(settings.data, tokenizer),
        batch_size=settings.data.batch_size,
        micro_batch_size=settings.data.micro_batch_size,
        seed=settings.seed,
        pad_id=pad_id if isinstance(pad_id, int) else 0,  # what is padded is masked: any token will do
    )


def _load_tokenizer(base: Checkpoint) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.path, local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise BaseCheckpointError(
            f"{base.path} has no tokenizer that can be loaded: {first_line}; add the tokenizer's files"
        ) from None
    # Where there are no files transformers makes a tokenizer without a vocabulary.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise BaseCheckpointError(
            f"{base.path} has no tokenizer with a vocabulary; add the tokenizer's files"
        )
    return tokenizer


def _opening(settings: Settings, ranks: Ranks, batches: Batches) -> str:
    """What rank 0 says before the first step."""
    num_cut = sum(example.is_cut for example in batches.examples)
    rows = f"{len(batches.examples)} rows" + (f" ({num_cut} cut to data.max_length)" if num_cut else "")
    return (
        f"settings: {json.dumps(asdict(settings))}\n{ranks.world_size} rank(s) on {ranks.device.type}, {rows}"
    )
