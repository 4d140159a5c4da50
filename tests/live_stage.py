"""A training that publishes, and live servers that follow it: the two sides of a test with a real engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from exporter_ranks import Case, build, train
from peft import PeftModel
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM
from vllm_server import LiveServer, live_server

from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange


class Training:
    """A model in training, and its publisher."""

    def __init__(self, stage: Stage, model: PeftModel, publisher: Publisher) -> None:
        self._stage, self._model, self._publisher = stage, model, publisher

    def publish(self, *, new_weights: bool = True) -> int:
        self._stage.step += 1
        if new_weights:
            train(self._model, self._stage.step)
        return self._publisher.publish(self._stage.step).wait().number


class Stage:
    """A base of one small file a tensor or two, the server's own copy of it, and an exchange."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.exchange, self.step = directory, directory / "exchange", 0
        self.base, self.servers_base = make_tiny_model(directory / "base"), directory / "servers-base"
        AutoModelForCausalLM.from_pretrained(self.base).save_pretrained(self.base, max_shard_size="40KB")
        (self.base / "model.safetensors").unlink()
        shutil.copytree(self.base, self.servers_base)

    @contextmanager
    def training(self, targets: object = "all-linear") -> Iterator[Training]:
        model = build(Case(base="base", lora={"target_modules": targets}), self.directory)
        with Publisher(model, Exchange.open(self.exchange, base=self.base)) as publisher:
            yield Training(self, model, publisher)

    @contextmanager
    def server(
        self,
        apply: str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        name: str = "server",
        under: Sequence[str] = (),
    ) -> Iterator[LiveServer]:
        paths = (self.directory, self.servers_base, self.exchange)
        with live_server(*paths, apply, *flags, environment=environment, name=name, under=under) as server:
            yield server
