"""An adapter comes back exactly, into any sharding on any number of ranks, or the model stays as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix_cells import Cell, build
from matrix_families import save_base
from matrix_shardings import SHARDINGS
from matrix_variants import move
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from weightferry.exporter.adapter_loading import load_adapter, load_version_adapter
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import BaseMismatchError, ConfigError, LoadError
from weightferry.shared.exchange import Exchange

pytestmark = pytest.mark.ranks

FAMILY = "qwen2"
FILES = ("adapter_model.safetensors", "adapter_config.json")
LOADABLE = (
    "LoRA",
    "DoRA",
    "embedding, lm_head",
    "modules_to_save",
    "tokens",
    "patterns",
    "biases",
    "VeRA",
    "SHiRA",
)
INTO = (
    "unsharded",
    "FSDP2 x2",
    "FSDP2 x3",
    "HSDP 1x2",
    "mixed precision",
    "CheckpointWrapper",
    "FSDP1 x2",
    "FSDP1 x3",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter-loading")
    save_base(FAMILY, path / FAMILY)
    run_on_ranks(save_adapters, path, world_size=1)
    return path


def cell(variant: str, sharding: str) -> Cell:
    return Cell(family=FAMILY, variant=variant, sharding=sharding)


def saved(directory: Path, of: Cell) -> Path:
    return directory / "saved" / of.reference


def save_adapters(directory: Path) -> None:
    """What PEFT saves, of the narrow and of the widened base."""
    for variant in LOADABLE:
        for sharding in ("unsharded", "FSDP1 x2"):
            of = cell(variant, sharding)
            if not saved(directory, of).exists():
                build(directory, of).save_pretrained(saved(directory, of))


def publish_loaded(directory: Path, sharding: str) -> dict[str, Path]:
    """Load each variant into a model trained otherwise, and publish it."""
    world_size, published = SHARDINGS[sharding].world_size, {}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for variant in LOADABLE:
        of = cell(variant, sharding)
        model = build(directory, of)
        move(model, seed=99)
        root = SHARDINGS[sharding].apply(model)
        load_adapter(root, saved(directory, of))
        path = directory / f"{world_size}-{sharding}-{variant}"
        exchange = Exchange.open(path, base=directory / FAMILY) if is_first else None
        with Publisher(root, exchange, publish="adapter") as publisher:
            published[variant] = publisher.publish(1).wait().path / "adapter"
    return published


@pytest.mark.parametrize("sharding", INTO)
def test_what_was_loaded_is_saved_again_byte_for_byte(directory, sharding):
    world_size = max(1, SHARDINGS[sharding].world_size)
    for variant, path in run_on_ranks(publish_loaded, directory, sharding, world_size=world_size)[0].items():
        for file in FILES:
            expected = (saved(directory, cell(variant, sharding)) / file).read_bytes()
            assert (path / file).read_bytes() == expected, (variant, file)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = path / FILES[0]
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / FILES[1]).read_text()) | changes
    (path / FILES[1]).write_text(json.dumps(config))


Tensors = dict[str, torch.Tensor]
A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def with_orig_mod(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "layers.0._orig_mod."): t for name, t in tensors.items()}


def of_another_rank(tensors: Tensors) -> Tensors:
    return {n: (t[:2] if "lora_A" in n else t[:, :2]).contiguous() for n, t in tensors.items()}


def local_shard(tensors: Tensors) -> Tensors:
    return tensors | {A0: tensors[A0][:2].contiguous()}


def not_finite(tensors: Tensors) -> Tensors:
    value = tensors[A0].clone()
    value[1, 2] = float("nan")
    return tensors | {A0: value}


def cut(path: Path) -> None:
    data = (path / FILES[0]).read_bytes()
    (path / FILES[0]).write_bytes(data[:-10])


# What is done to a good directory, the error, and its words.
DAMAGES: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "wrapper names": (
        lambda d: edit_tensors(d, with_orig_mod),
        ConfigError,
        r"lacks .*layers\.0\.mlp\.down_proj.* and \d+ more and has .*_orig_mod\..* instead; give the adapter",
    ),
    "another rank": (
        lambda d: edit_tensors(d, of_another_rank),
        ConfigError,
        r"lora_A\.weight F32 \[4, \d+\] expected, .* F32 \[2, \d+\] found \(and \d+ more tensors differ\)",
    ),
    "fewer targets": (
        lambda d: edit_tensors(d, lambda t: {n: v for n, v in t.items() if "q_proj" not in n}),
        ConfigError,
        r"lacks .*q_proj\.lora_A\.weight",
    ),
    "more targets": (
        lambda d: edit_tensors(d, lambda t: t | {A0.replace("q_proj", "k_proj"): torch.zeros(4, 60)}),
        ConfigError,
        r"has .*k_proj\.lora_A\.weight, which this model's adapter has not",
    ),
    "a local shard": (
        lambda d: edit_tensors(d, local_shard),
        ConfigError,
        r"\[4, 60\] expected, .* \[2, 60\]",
    ),
    "another dtype": (
        lambda d: edit_tensors(d, lambda t: t | {A0: t[A0].bfloat16()}),
        ConfigError,
        r"F32 \[4, 60\] expected, .* BF16",
    ),
    "not finite": (
        lambda d: edit_tensors(d, not_finite),
        ConfigError,
        r"q_proj\.lora_A\.weight is not finite",
    ),
    "another alpha": (
        lambda d: edit_config(d, lora_alpha=32),
        ConfigError,
        r"lora_alpha: 8 expected .* 32 found",
    ),
    "another scaling": (
        lambda d: edit_config(d, use_rslora=True),
        ConfigError,
        r"use_rslora: False expected",
    ),
    "another base": (
        lambda d: edit_config(d, base_model_name_or_path="org/other"),
        BaseMismatchError,
        r"names org/other as its base, .*start_from_any_base = true",
    ),
    "no base": (
        lambda d: edit_config(d, base_model_name_or_path=None),
        BaseMismatchError,
        r"names no base as its base",
    ),
    "cut": (cut, LoadError, r"the adapter was not loaded: rank 0 failed: .*adapter_model.safetensors"),
    "no weights": (lambda d: (d / FILES[0]).unlink(), ConfigError, r"is not there; give the directory"),
    "no config": (lambda d: (d / FILES[1]).unlink(), ConfigError, r"adapter_config.json cannot be read"),
}


def local_bytes(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = root.state_dict(keep_vars=True)
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}


def refuse_all(directory: Path, sharding: str) -> dict[str, tuple[str, str]]:
    """Each damage's error on this rank; the model must stay as it was."""
    root, said = SHARDINGS[sharding].apply(build(directory, cell("LoRA", sharding))), {}
    for name in DAMAGES:
        before = local_bytes(root)
        try:
            load_adapter(root, directory / "damaged" / sharding / name)
        except Exception as error:
            said[name] = (type(error).__name__, str(error))
        after = local_bytes(root)
        assert all(torch.equal(after[key], before[key]) for key in before), name
    return said


@pytest.mark.parametrize("sharding", ["unsharded", "FSDP2 x2", "FSDP1 x2"])
def test_what_is_not_this_adapter_is_refused_on_every_rank_and_changes_nothing(directory, sharding):
    of = cell("LoRA", sharding)
    for name, (damage, _, _) in DAMAGES.items():
        copy = shutil.copytree(saved(directory, of), directory / "damaged" / sharding / name)
        damage(copy)
    world_size = max(1, SHARDINGS[sharding].world_size)
    for said in run_on_ranks(refuse_all, directory, sharding, world_size=world_size):
        for name, (_, kind, words) in DAMAGES.items():
            assert name in said, f"{name} was accepted"
            assert said[name][0] == kind.__name__, said[name]
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(said[name][1])


def refuse_on_one_rank(directory: Path) -> tuple[str, bool]:
    """Rank 1 sees another file than rank 0."""
    of = cell("LoRA", "FSDP2 x2")
    root = SHARDINGS[of.sharding].apply(build(directory, of))
    mine = directory / f"seen-by-{dist.get_rank()}"
    shutil.copytree(saved(directory, of), mine)
    if dist.get_rank() == 1:
        edit_tensors(mine, lambda t: t | {A0: t[A0] + 1})
    before, said = local_bytes(root), ""
    try:
        load_adapter(root, mine)
    except LoadError as error:
        said = str(error)
    return said, all(torch.equal(value, before[key]) for key, value in local_bytes(root).items())


def test_ranks_that_see_different_files_load_none(directory):
    for said, is_untouched in run_on_ranks(refuse_on_one_rank, directory, world_size=2):
        assert "rank 1 failed" in said
        assert "is not the file that rank 0 reads" in said
        assert is_untouched


def test_another_place_of_the_same_base_is_taken_on_request(directory, tmp_path):
    of = cell("LoRA", "unsharded")
    copy = shutil.copytree(saved(directory, of), tmp_path / "adapter")
    edit_config(copy, base_model_name_or_path="/mnt/elsewhere/base")
    model = build(directory, of)
    load_adapter(model, copy, any_base=True)


def test_a_version_that_is_not_there_or_holds_no_adapter_is_told(directory, tmp_path):
    of = cell("LoRA", "unsharded")
    model, exchange = build(directory, of), Exchange.open(tmp_path / "exchange", base=directory / FAMILY)
    with Publisher(model, exchange, publish="both") as publisher:
        version = publisher.publish(1).wait()
    with pytest.raises(LoadError, match="has no version 77"):
        load_version_adapter(model, exchange, 77)
    file = version.path / "adapter" / FILES[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadError, match=r"adapter_model\.safetensors: has other bytes"):
        load_version_adapter(model, exchange, version.number)
