"""Tied embeddings: written once while equal; if training parts them, both are, and the config says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import Case, build, shard
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange

pytestmark = pytest.mark.ranks

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION = {"target_modules": ["q_proj"]}
CASES = {
    "untouched": Case(base="tied", lora=ATTENTION),
    "embedding": Case(base="tied", lora={"target_modules": ["embed_tokens"]}),
    "head": Case(base="tied", lora={"target_modules": ["lm_head"]}),
    "head, trained whole": Case(base="tied", lora=ATTENTION | {"modules_to_save": ["lm_head"]}),
    "tokens": Case(base="tied", lora=ATTENTION | {"trainable_token_indices": [3, 40]}),
    "both stored, untouched": Case(base="stored", lora=ATTENTION),
    "both stored, tokens": Case(base="stored", lora=ATTENTION | {"trainable_token_indices": [3, 40]}),
    "both stored, head": Case(base="stored", lora={"target_modules": ["lm_head"]}),
}
PARTED = ("embedding", "head", "head, trained whole", "both stored, head")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ties")
    make_tiny_model(path / "tied", tied=True)
    stored = make_tiny_model(path / "stored", tied=True) / "model.safetensors"
    tensors = load_file(stored)
    save_file(tensors | {HEAD: tensors[EMBED].clone()}, stored, metadata={"format": "pt"})
    return path


def move_trained(model: torch.nn.Module) -> None:
    """New values for everything trained that is no LoRA factor (those `build` has trained)."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    values = distribute_tensor(values, mesh, placements, src_data_rank=None)
                parameter.copy_(values)


def publish(directory: Path) -> dict[str, tuple[Path, torch.Tensor]]:
    """Version directory and live logits of each case."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    published = {}
    for name, case in CASES.items():
        # in float32 everything trained has one dtype, which FSDP wants of a unit
        model = shard(build(case, directory, dtype=torch.float32), world_size)
        move_trained(model)
        is_first = world_size == 1 or dist.get_rank() == 0
        path = directory / f"exchange-{world_size}-{name}"
        exchange = Exchange.open(path, base=directory / case.base) if is_first else None
        with Publisher(model, exchange) as publisher:
            version = publisher.publish(1).wait()
        with torch.no_grad():
            logits = model(input_ids=torch.arange(3, 35).reshape(2, 16)).logits
        published[name] = (version.path, logits)
    return published


@pytest.fixture(scope="module")
def published(directory: Path) -> dict[int, dict[str, tuple[Path, torch.Tensor]]]:
    return {world: run_on_ranks(publish, directory, world_size=world)[0] for world in (1, 2)}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_pair_is_written_twice_only_if_it_differs_or_the_base_does_so(
    directory, published, name, world_size
):
    path, _ = published[world_size][name]
    found, config = weights(path), json.loads((path / "config.json").read_text())
    base_config = directory / CASES[name].base / "config.json"
    assert (HEAD in found) == (name in PARTED or CASES[name].base == "stored")
    if name in PARTED:
        assert not torch.equal(found[EMBED], found[HEAD])
        assert config == json.loads(base_config.read_text()) | {"tie_word_embeddings": False}
    else:
        assert torch.equal(found[EMBED], found.get(HEAD, found[EMBED]))
        assert (path / "config.json").read_bytes() == base_config.read_bytes()


def test_only_the_part_that_was_trained_moves(directory, published):
    base = weights(directory / "tied")[EMBED]
    of_embedding, of_head = (weights(published[1][name][0]) for name in ("embedding", "head"))
    assert torch.equal(of_embedding[HEAD], base)
    assert not torch.equal(of_embedding[EMBED], base)
    assert torch.equal(of_head[EMBED], base)
    assert not torch.equal(of_head[HEAD], base)
    moved = (weights(published[1]["tokens"][0])[EMBED] != base).any(dim=1).nonzero().flatten()
    assert moved.tolist() == [3, 40]


@pytest.mark.parametrize("name", CASES)
def test_a_version_loads_whole_and_answers_as_the_model_in_training(published, name):
    path, live = published[1][name]
    whole: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = whole
    assert not any(info.values()), info
    with torch.no_grad():
        loaded = model(input_ids=torch.arange(3, 35).reshape(2, 16)).logits
    assert (loaded - live).abs().max() < 0.05 * live.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_write_the_same_bytes(published, name):
    one, two = published[1][name][0], published[2][name][0]
    for file in one.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            assert file.read_bytes() == (two / file.relative_to(one)).read_bytes(), file


def publish_from_the_start(directory: Path) -> list[Path]:
    """Publish before the first step, when the pair is still equal, and after it."""
    model = build(CASES["embedding"], directory)
    factors = [p for n, p in model.named_parameters() if "lora_embedding_A" in n]
    kept = [factor.detach().clone() for factor in factors]
    exchange = Exchange.open(directory / "from-the-start", base=directory / "tied")
    with Publisher(model, exchange) as publisher, torch.no_grad():
        for factor in factors:
            factor.zero_()
        first = publisher.publish(0).wait().path
        for factor, value in zip(factors, kept, strict=True):
            factor.copy_(value)
        return [first, publisher.publish(1).wait().path]


def test_a_pair_may_part_during_a_run(directory):
    ((first, second),) = run_on_ranks(publish_from_the_start, directory, world_size=1)
    assert HEAD not in weights(first)
    assert HEAD in weights(second)
    assert json.loads((first / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((second / "config.json").read_text())["tie_word_embeddings"] is False
    first_version, second_version = Exchange.open(directory / "from-the-start").versions()
    assert first_version.manifest.tied == ((HEAD, EMBED),)
    assert second_version.manifest.tied == ()
    assert verify_exchange(Exchange.open(directory / "from-the-start")) == []
