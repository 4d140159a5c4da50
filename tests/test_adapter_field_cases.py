"""Failures that people met in public with adapters and merges: resumed, named, scaled, tied, transposed."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exporter_ranks import train
from matrix_families import FAMILIES, IDS, load, save_base
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from trainer_job import TrainerJob
from transformers import AutoModelForCausalLM

from weightferry.exporter.adapter_loading import load_adapter
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import BaseMismatchError
from weightferry.shared.exchange import Exchange

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapted(base: Any, **settings: Any) -> PeftModel:
    plain: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    model: Any = get_peft_model(base, LoraConfig(**plain | settings))
    train(model, seed=1)
    return model.eval()


def published(model: PeftModel, base: Path, exchange: Path, what: str = "both") -> Path:
    with Publisher(model, Exchange.open(exchange, base=base), publish=what) as publisher:
        return publisher.publish(1).wait().path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def files_of(version: Path) -> dict[str, bytes]:
    """Everything but the manifest, which has a time and a name in it."""
    files = {str(path.relative_to(version)): path for path in version.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != "manifest.json"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainerJob:
    """A job of two ranks that has published its last version."""
    path = tmp_path_factory.mktemp("resume")
    job = TrainerJob(directory=path, base=make_tiny_model(path / "base")).write()
    assert job.run("schedule.num_steps=2", num_ranks=2).returncode == 0
    return job


ONE_MORE = ("schedule.num_steps=1", "publish.at_start=true")


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "num_ranks"), [("number", 2), ("directory", None)])
def test_case_9_the_first_version_after_a_resume_is_the_last_one_before_it(trained, kind, num_ranks):
    last = Exchange.open(trained.exchange).versions()[-1]
    start = str(last.number) if kind == "number" else json.dumps(str(last.path / "adapter"))
    done = trained.run(*ONE_MORE, f"start_from={start}", num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    first = next(v for v in Exchange.open(trained.exchange).versions() if v.number > last.number)
    assert first.step == 0
    assert files_of(first.path) == files_of(last.path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("damage", "settings", "words"),
    [
        ("wrapper names", (), "_orig_mod."),
        ("none", ("lora.r=2",), "lora_A.weight F32 [2, 256] expected"),
        ("none", ('lora.target_modules=["q_proj"]',), "which this model's adapter has not"),
    ],
)
def test_case_9_another_adapter_ends_the_job_before_its_first_step(
    trained, tmp_path, damage, settings, words
):
    last = Exchange.open(trained.exchange).versions()[-1]
    copy = shutil.copytree(last.path / "adapter", tmp_path / "adapter")
    if damage == "wrapper names":
        tensors = load_file(copy / WEIGHTS)
        renamed = {n.replace(".layers.0.", ".layers.0._orig_mod."): t for n, t in tensors.items()}
        save_file(renamed, copy / WEIGHTS, metadata={"format": "pt"})
    done = trained.run(*ONE_MORE, *settings, f"start_from={json.dumps(str(copy))}")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert Exchange.open(trained.exchange).versions()[-1].number >= last.number


@pytest.mark.parametrize("origin", ["in memory", "a relative path", "an absolute path"])
def test_case_10_the_adapter_always_names_its_base(tmp_path, monkeypatch, origin):
    base = make_tiny_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    place = {"in memory": base, "a relative path": "base", "an absolute path": base}[origin]
    live = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    if origin == "in memory":
        made = type(live)(live.config).bfloat16()
        made.load_state_dict(live.state_dict())
        made.name_or_path, made.config._name_or_path = "", ""
        live = made
    version = published(adapted(live), base, tmp_path / "exchange", "adapter")
    named = json.loads((version / "adapter" / CONFIG).read_text())["base_model_name_or_path"]
    assert named
    assert os.path.realpath(named) == str(base)


def test_case_10_a_base_that_is_mounted_elsewhere_is_told_and_can_be_taken(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    live = adapted(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    directory = published(live, base, tmp_path / "exchange", "adapter") / "adapter"
    moved = shutil.copytree(base, tmp_path / "elsewhere")
    other = adapted(AutoModelForCausalLM.from_pretrained(moved, dtype=torch.bfloat16))
    with pytest.raises(
        BaseMismatchError, match=r"names \S*base as its base, .* loaded from \S*elsewhere; .*any_base"
    ):
        load_adapter(other, directory)
    load_adapter(other, directory, any_base=True)
    assert torch.equal(logits(other), logits(live))


@pytest.mark.parametrize("is_stabilised", [True, False])
def test_case_13_merged_weights_use_each_modules_own_scaling(tmp_path, is_stabilised):
    base = make_tiny_model(tmp_path / "base")
    live = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"o_proj": 5}}
    modules = ["q_proj", "v_proj", "o_proj"]
    live = adapted(live, r=8, lora_alpha=16, use_rslora=is_stabilised, target_modules=modules, **patterns)
    version = published(live, base, tmp_path / "exchange")
    before, after = load_file(base / "model.safetensors"), {}
    for file in version.glob("*.safetensors"):
        after |= load_file(file)
    factors = load_file(version / "adapter" / WEIGHTS)
    for module, rank, alpha in (("q_proj", 8, 16), ("v_proj", 2, 16), ("o_proj", 8, 5)):
        name = f"model.layers.1.self_attn.{module}"
        a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
        assert a.shape[0] == rank
        scaling = alpha / (math.sqrt(rank) if is_stabilised else rank)
        weight = before[f"{name}.weight"]
        assert torch.equal(after[f"{name}.weight"], (weight.double() + scaling * (b @ a)).to(weight.dtype))
    merged = AutoModelForCausalLM.from_pretrained(version, dtype=torch.float32)
    assert (logits(merged) - logits(live)).abs().max() < 2**-5 * logits(live).abs().max()


@pytest.mark.parametrize("family", ["qwen2 tied", "gpt2", "llama"])
def test_case_14_tied_transposed_and_non_contiguous_tensors_come_out_whole(tmp_path, family):
    """A tied tensor is written once, GPT-2's weights are transposed, llama's here are not contiguous."""
    base, kind = save_base(family, tmp_path / "base"), FAMILIES[family]
    live: Any = load(family, base, torch.float32)
    if family == "llama":
        for layer in live.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.data = weight.data.t().contiguous().t()
            assert not weight.is_contiguous()
    live = adapted(live, target_modules=list(kind.linear), fan_in_fan_out=kind.is_transposed)
    version = published(live, base, tmp_path / "exchange")
    names = [name for file in version.glob("*.safetensors") for name in load_file(file)]
    assert sorted(names) == sorted(load_file(base / "model.safetensors"))
    assert len(names) == len(set(names))
    assert any("lm_head" in name for name in names) != kind.is_tied
    whole: Any = kind.model_class.from_pretrained(version, dtype=torch.float32, output_loading_info=True)
    reloaded, info = whole
    assert not any(info.values())
    assert (logits(reloaded) - logits(live)).abs().max() < 2**-5 * logits(live).abs().max()
    assert torch.equal(logits(reloaded), logits(load(family, version, torch.float32)))
