"""What tests of the exporter run on ranks: build an adapted model, shard it, publish it."""

from __future__ import annotations

import errno
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from weightferry.exporter import desk
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared import durable
from weightferry.shared.errors import PublishError
from weightferry.shared.exchange import Exchange

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A base (a directory name below the test's) and an adapter's settings."""

    base: str
    lora: dict[str, Any] = field(default_factory=dict)


CASES = {
    "all-linear": Case(base="tiny", lora={"target_modules": "all-linear"}),
    "queries only": Case(base="tiny", lora={"target_modules": ["q_proj"]}),
    "tied, rslora, patterns": Case(
        base="tied",
        lora={
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "r": 8,
            "lora_alpha": 16,
            "use_rslora": True,
            "rank_pattern": {"down_proj": 3},
            "alpha_pattern": {"v_proj": 5},
        },
    ),
    "odd sizes": Case(base="odd", lora={"target_modules": "all-linear"}),
    "experts": Case(base="moe", lora={"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "experts, inputs first": Case(
        base="gpt-oss", lora={"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    ),
    "attention of experts": Case(base="moe", lora={"target_modules": ["v_proj"]}),
    "dora": Case(base="tiny", lora={"target_modules": ["k_proj", "up_proj"], "use_dora": True}),
    "head and embedding": Case(base="tiny", lora={"target_modules": ["lm_head", "embed_tokens"]}),
    "biases": Case(base="tiny", lora={"target_modules": ["q_proj"], "lora_bias": True}),
}


def build(case: Case, directory: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> PeftModel:
    """The case's model with an adapter whose every factor is normal(0, 0.05)."""
    model = AutoModelForCausalLM.from_pretrained(directory / case.base, dtype=dtype)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**settings | case.lora))
    train(adapted, seed)
    return adapted


def train(model: PeftModel, seed: int) -> None:
    """Give every trainable tensor new values, whatever its sharding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name or "magnitude" in name:
                continue
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                values = distribute_tensor(
                    values, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(values)


def shard(model: PeftModel, world_size: int) -> PeftModel:
    """FSDP2, a unit a decoder layer and the root."""
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in base_model(model).model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def place() -> tuple[int, int]:
    """This process's rank and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def open_exchange(rank: int, path: Path, base: Path) -> Exchange | None:
    return Exchange.open(path, base=base) if rank == 0 else None


def publish_cases(directory: Path, names: list[str]) -> dict[str, Path]:
    """Publish each case once; returns the version directories."""
    rank, world_size = place()
    published = {}
    for name in names:
        case = CASES[name]
        model = shard(build(case, directory), world_size)
        before = base_hash(model)
        exchange = open_exchange(rank, directory / f"exchange-{world_size}-{name}", directory / case.base)
        # vLLM needs no adapter directory of these: they are published merged
        with Publisher(model, exchange, publish="both") as publisher:
            published[name] = publisher.publish(7, metrics={"loss": 0.5}).wait().path
        assert base_hash(model) == before, f"{name}: the base changed"
    return published


def base_hash(model: PeftModel) -> str:
    """A digest over the bytes of every tensor of the base on this rank."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if "lora_" not in name:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(name.encode() + local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def publish_fifty(directory: Path) -> list[str]:
    """Publish 50 times with changing adapters, the first state again at the end; digests of the shards."""
    rank, world_size = place()
    case = CASES["all-linear"]
    model = shard(build(case, directory), world_size)
    before, shards = base_hash(model), []
    exchange = open_exchange(rank, directory / f"fifty-{world_size}", directory / case.base)
    with Publisher(model, exchange, publish="merged") as publisher:
        for step in range(50):
            train(model, seed=0 if step == 49 else step)
            version = publisher.publish(step).wait()
            data = b"".join((version.path / f"layer-0000{i}.safetensors").read_bytes() for i in (0, 1))
            shards.append(hashlib.sha256(data).hexdigest())
    assert base_hash(model) == before, "the base drifted"
    return shards


def publish_through_failures(directory: Path) -> list[str]:
    """A full disk at every third file, then a good publish; returns what each failure said."""
    rank, world_size = place()
    case = CASES["all-linear"]
    model = shard(build(case, directory), world_size)
    before, said = base_hash(model), []
    exchange = open_exchange(rank, directory / "failures", directory / case.base)
    with Publisher(model, exchange, publish="both") as publisher:
        for file in range(0, 12, 3):
            with full_disk_at_file(file if rank == 0 else -1):
                try:
                    publisher.publish(file)
                except PublishError as error:
                    said.append(str(error))
        assert base_hash(model) == before
        version = publisher.publish(99).wait()
    return [*said, str(version.path)]


def full_disk_at_file(number: int) -> Any:
    """From the given new file on, every write fails as on a full disk; never with a negative number."""
    real, opened = durable.NewFile.__enter__, []

    def enter(self: durable.NewFile) -> durable.NewFile:
        opened.append(self)
        if 0 <= number < len(opened):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return real(self)

    return mock.patch.object(durable.NewFile, "__enter__", enter)


def without_shared_pages() -> Any:
    """As where each rank has a kernel of its own: units are dealt to ranks, not written by rows."""
    return mock.patch.object(desk, "_identity", return_value=[place()[0]])


def refuse(directory: Path, wrong: str) -> str:
    """Make a Publisher that must be refused; returns the message on this rank."""
    rank, world_size = place()
    case = CASES["all-linear"]
    if wrong == "pissa":
        case = Case(base="tiny", lora={"target_modules": ["q_proj"], "init_lora_weights": "pissa"})
    model = build(case, directory, dtype=torch.float32 if wrong == "pissa" else torch.bfloat16)
    if wrong == "changed base":
        with torch.no_grad():
            base_model(model).model.norm.weight[3] += 1
    shard(model, world_size)
    exchange = open_exchange(rank, directory / f"refused-{wrong}", directory / case.base)
    try:
        Publisher(model, exchange)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was accepted"
