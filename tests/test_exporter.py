"""The exporter on real ranks: exact bits, the base's names, a model only read (format.md [2] to [5])."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from exporter_ranks import CASES, build, publish_cases, publish_fifty, publish_through_failures, refuse
from peft import PeftModel
from ranks import run_on_ranks
from safetensors.torch import load_file
from tiny_model import make_odd_model, make_tiny_gpt_oss, make_tiny_model, make_tiny_moe
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.exchange import Exchange
from weightferry.shared.fused import fused_group
from weightferry.shared.manifest import Manifest
from weightferry.shared.verify import verify_exchange

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("exporter")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "tied", tied=True)
    make_odd_model(path / "odd")
    make_tiny_moe(path / "moe")
    make_tiny_gpt_oss(path / "gpt-oss")
    return path


@pytest.fixture(scope="module")
def published(directory):
    """World size -> case -> version directory; one run of ranks for all cases."""
    runs = {1: list(CASES), 2: list(CASES), 3: ["odd sizes"]}
    return {
        world: run_on_ranks(publish_cases, directory, names, world_size=world)[0]
        for world, names in runs.items()
    }


def load_directory(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in tensors, f"{file} repeats {name}"
            tensors[name] = tensor
    return tensors


def reference_merge(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """PEFT's own merge of one whole float64 model, in hub names; rounded once, to the base's dtypes."""
    case = CASES[name]
    live = build(case, directory)
    exact = build(case, directory, dtype=torch.float64)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    exact.load_state_dict({key: value.double() for key, value in live.state_dict().items()})
    merged = exact.merge_and_unload()
    state = {k: v for k, v in merged.state_dict().items() if k not in merged.all_tied_weights_keys}
    base = load_directory(directory / case.base)
    return {k: v.to(base[k].dtype) for k, v in revert_weight_conversion(merged, state).items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_equals_the_reference_merge_bit_for_bit(directory, published, name, world_size):
    expected = reference_merge(directory, name)
    found = load_directory(published[world_size][name])
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert found[tensor].dtype == expected[tensor].dtype, tensor
        assert torch.equal(found[tensor], expected[tensor]), tensor


def test_the_rule_is_one_line_of_torch(directory, published):
    base, found = load_directory(directory / "tiny"), load_directory(published[2]["all-linear"])
    factors = load_file(published[2]["all-linear"] / "adapter" / "adapter_model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
        weight = base[f"{name}.weight"]
        assert torch.equal(found[f"{name}.weight"], (weight.double() + 2.0 * (b @ a)).to(weight.dtype))
        assert not torch.equal(found[f"{name}.weight"], weight)


@pytest.mark.parametrize("name", CASES)
def test_world_sizes_give_byte_identical_weights(published, name):
    one, two = published[1][name], published[2][name]
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(two) for path in two.rglob("*.safetensors"))
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file


def test_three_ranks_and_odd_sizes_give_the_same_bytes(published):
    one, three = published[1]["odd sizes"], published[3]["odd sizes"]
    for file in one.rglob("*.safetensors"):
        assert file.read_bytes() == (three / file.relative_to(one)).read_bytes(), file


@pytest.mark.parametrize("name", CASES)
def test_a_version_loads_with_no_missing_or_unexpected_key(published, name):
    _, info = cast(tuple, AutoModelForCausalLM.from_pretrained(published[2][name], output_loading_info=True))
    assert not any(info.values()), info


@pytest.mark.parametrize("name", CASES)
def test_names_shapes_and_dtypes_are_the_bases_and_changes_are_closed_under_fusion(
    directory, published, name
):
    version = published[2][name]
    manifest = Manifest.from_bytes((version / "manifest.json").read_bytes(), "m")
    specs = Checkpoint.open(directory / CASES[name].base).specs
    assert {(e.name, e.dtype, e.shape) for e in manifest.tensors} == {
        (spec.name, spec.dtype, spec.shape) for spec in specs.values()
    }
    changed = {fused_group(entry.name) for entry in manifest.tensors if entry.changed}
    unchanged = {fused_group(entry.name) for entry in manifest.tensors if not entry.changed}
    assert changed
    assert not changed & unchanged


def test_attention_adapters_of_an_expert_model_do_not_ship_the_experts(published):
    version = published[2]["attention of experts"]
    manifest = Manifest.from_bytes((version / "manifest.json").read_bytes(), "m")
    assert not [entry.name for entry in manifest.tensors if entry.changed and "experts" in entry.name]


@pytest.mark.parametrize("name", ["all-linear", "tied, rslora, patterns", "experts", "dora"])
def test_the_adapter_directory_is_pefts_own(directory, published, name, tmp_path):
    build(CASES[name], directory).save_pretrained(tmp_path)
    for world_size in (1, 2):
        ours = published[world_size][name] / "adapter" / "adapter_model.safetensors"
        assert ours.read_bytes() == (tmp_path / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["all-linear", "tied, rslora, patterns", "head and embedding"])
def test_the_adapter_loads_and_answers_as_the_merged_version_does(directory, published, name):
    ids = torch.arange(3, 35).reshape(2, 16)
    base = AutoModelForCausalLM.from_pretrained(directory / CASES[name].base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, published[2][name] / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(published[2][name], dtype=torch.float32)
    with torch.no_grad():
        difference = (adapted(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max()
        scale = adapted(input_ids=ids).logits.abs().max()
    assert difference < 0.05 * scale  # one bfloat16 rounding a weight


@pytest.mark.parametrize("world_size", [1, 2])
def test_fifty_publishes_leave_the_base_as_it_was_and_repeat_themselves(directory, world_size):
    for shards in run_on_ranks(publish_fifty, directory, world_size=world_size):
        assert shards[49] == shards[0]
        assert len(set(shards)) == 49


def test_a_full_disk_is_said_on_every_rank_and_the_next_publish_works(directory):
    first, second = run_on_ranks(publish_through_failures, directory, world_size=2)
    assert first == second
    assert len(first) == 5
    assert all("rank 0 failed" in said and "No space left" in said for said in first[:4])
    exchange = Exchange.open(directory / "failures")
    assert [version.step for version in exchange.versions()] == [99]
    assert verify_exchange(exchange) == []
    assert len(list((directory / "failures" / "versions").iterdir())) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("pissa", "UnsupportedError: adapter 'default' has init_lora_weights='pissa'"),
        ("changed base", "BaseMismatchError: the model in training differs"),
    ],
)
def test_what_cannot_be_published_right_is_refused_on_every_rank_at_the_start(directory, wrong, words):
    for said in run_on_ranks(refuse, directory, wrong, world_size=2):
        assert said.startswith(words), said
