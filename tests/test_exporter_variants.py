"""Every kind of adapter and of wrapping that PEFT and FSDP2 know: the bits of one exact merge, format.md [4].

The reference is PEFT's own merge_and_unload of a float64 copy of one whole model, saved by transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exporter_ranks import Case, base_hash, build
from peft import LoraConfig, PeftModel
from peft.tuners.lora import KasaConfig
from peft.utils.other import AuxiliaryTrainingWrapper
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model, make_tokenizer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from weightferry.exporter.adapter_directory import AdapterView
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange

pytestmark = pytest.mark.ranks

QV = {"target_modules": ["q_proj", "v_proj"]}
VARIANTS: dict[str, Case] = {
    "rank stabilised, factors in bfloat16": Case(base="tiny", lora=QV | {"use_rslora": True, "r": 6}),
    "dora on every kind": Case(
        base="tiny", lora={"use_dora": True, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}
    ),
    "modules trained whole": Case(base="tiny", lora=QV | {"modules_to_save": ["lm_head", "norm"]}),
    "single tokens": Case(base="tiny", lora=QV | {"trainable_token_indices": [3, 40]}),
    "biases of adapted modules": Case(base="tiny", lora={"target_modules": ["q_proj"], "bias": "lora_only"}),
    "all biases": Case(base="tiny", lora={"target_modules": ["o_proj"], "bias": "all"}),
    "some layers, no task": Case(base="tiny", lora=QV | {"layers_to_transform": [1], "task_type": None}),
    "two adapters": Case(base="tiny", lora=QV),
    "KaSA": Case(base="tiny", lora=QV | {"kasa_config": KasaConfig()}),
    "transposed layers": Case(
        base="gpt2", lora={"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    ),
    "names without the model's prefix": Case(
        base="bare gpt2", lora={"target_modules": ["c_attn"], "fan_in_fan_out": True}
    ),
    "the text model of a multimodal checkpoint": Case(base="multimodal", lora=QV),
    "a buffer that training moves": Case(
        base="deepseek",
        lora={"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
}


def save(model: Any, path: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def rename(path: Path, to: Callable[[str], str], more: dict[str, torch.Tensor] | None = None) -> None:
    """Rename the tensors of a saved checkpoint, and add some."""
    file = path / "model.safetensors"
    tensors = {to(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | (more or {}), file, metadata={"format": "pt"})


def save_text_model_of_a_multimodal_one(path: Path) -> None:
    """A Qwen3.5 whose checkpoint has other names than its text model, and a part that it passes over."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    linear: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "vocab_size": 97}
    kinds = ["linear_attention", "full_attention"]
    save(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, **linear, layer_types=kinds)), path)
    passed_over = {"model.visual.patch_embed.proj.bias": torch.ones(4, dtype=torch.bfloat16)}
    rename(path, lambda name: name.replace("model.", "model.language_model."), passed_over)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variants")
    make_tiny_model(path / "tiny")
    torch.manual_seed(0)
    gpt2 = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=97, n_positions=64, bos_token_id=0)
    save(GPT2LMHeadModel(gpt2), path / "gpt2")
    save(GPT2LMHeadModel(gpt2), path / "bare gpt2")
    rename(path / "bare gpt2", lambda name: name.removeprefix("transformer."))
    save_text_model_of_a_multimodal_one(path / "multimodal")
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "vocab_size": 97,
        "intermediate_size": 96,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    }
    ranks: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
    experts: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    deepseek = DeepseekV3Config(
        **sizes, **heads, **ranks, **experts, moe_intermediate_size=32, first_k_dense_replace=1
    )
    save(DeepseekV3ForCausalLM(deepseek), path / "deepseek")
    return path


def make(directory: Path, name: str) -> Any:
    """The variant's model after some training, whole. In float32 all that is trained can share a unit."""
    case = VARIANTS[name]
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    model: Any = build(case, directory, dtype=dtype)
    if name == "two adapters":
        model.add_adapter("second", LoraConfig(r=3, target_modules=["k_proj", "q_proj"], lora_alpha=5))
        model.base_model.set_adapter(["default", "second"])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for key, buffer in base_model(model).state_dict().items():
            if "e_score_correction_bias" in key:
                buffer.add_(0.25)
    return model.bfloat16() if "bfloat16" in name else model


def shard_separately(model: PeftModel) -> Any:
    """FSDP2 with a unit for each module that PEFT trains whole, each layer, and the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stack = next(m for m in base_model(model).modules() if isinstance(m, nn.ModuleList))
    whole = [m for m in model.modules() if isinstance(m, AuxiliaryTrainingWrapper)]
    for unit in [*whole, *stack, model]:
        fully_shard(unit, mesh=mesh)
    return model


def write_reference(model: Any, path: Path) -> None:
    """What one process makes of the model with PEFT and transformers alone, in float64."""
    exact = copy.deepcopy(model)
    for tensor in [*exact.parameters(), *exact.buffers()]:
        tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data
    exact.merge_and_unload().save_pretrained(path)


def publish_variants(directory: Path) -> dict[str, Path]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    is_first = world_size == 1 or dist.get_rank() == 0
    published = {}
    for name, case in VARIANTS.items():
        model = make(directory, name)
        if world_size == 1:
            write_reference(model, directory / f"reference-{name}")
        root = model if world_size == 1 else shard_separately(model)
        path = directory / f"exchange-{world_size}-{name}"
        exchange = Exchange.open(path, base=directory / case.base) if is_first else None
        before = base_hash(model)
        with Publisher(root, exchange, publish="merged") as publisher:
            published[name] = publisher.publish(1).wait().path
        assert base_hash(model) == before
    return published


@pytest.fixture(scope="module")
def published(directory: Path) -> dict[int, dict[str, Path]]:
    return {world: run_on_ranks(publish_variants, directory, world_size=world)[0] for world in (1, 2)}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def reference(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """What `write_reference` wrote, by the base's names."""
    base = weights(directory / VARIANTS[name].base)
    exact = weights(directory / f"reference-{name}")
    return {n if n in base else n.removeprefix("transformer."): tensor for n, tensor in exact.items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_exact_merge_rounded_once(directory, published, name, world_size):
    base, found = weights(directory / VARIANTS[name].base), weights(published[world_size][name])
    expected = reference(directory, name)
    assert found.keys() == base.keys() == expected.keys() | {n for n in base if ".visual." in n}
    for tensor in expected:
        assert found[tensor].dtype == base[tensor].dtype
        assert torch.equal(found[tensor], expected[tensor].to(base[tensor].dtype)), tensor
    assert any(not torch.equal(found[tensor], base[tensor]) for tensor in base)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_figures_of_every_variant_compare_with_the_base_and_not_with_what_training_left_of_it(
    directory, published, name, world_size
):
    base, found = weights(directory / VARIANTS[name].base), weights(published[world_size][name])
    exact = {tensor: value.double() for tensor, value in reference(directory, name).items()}
    manifest = json.loads((published[world_size][name] / "manifest.json").read_bytes())
    figures = manifest["fidelity"]["modules"]
    assert {t for t in exact if not torch.equal(found[t], base[t])} <= figures.keys()
    for tensor, of in figures.items():
        delta, error = exact[tensor] - base[tensor].double(), found[tensor].double() - exact[tensor]
        assert of["delta_norm"] == pytest.approx(float(delta.norm())), tensor
        assert of["share_equal_to_base"] == float((found[tensor] == base[tensor]).double().mean()), tensor
        if delta.any():
            assert of["relative_error"] == pytest.approx(float(error.norm() / delta.norm())), tensor


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads_whole(published, name):
    whole: Any = AutoModelForCausalLM.from_pretrained(published[2][name], output_loading_info=True)
    _, info = whole
    assert not any(info.values()), info


def plain_layers(model: PeftModel) -> nn.ModuleList:
    return base_model(model).model.layers


def on_layers(wrap: Callable[[nn.Module], Any]) -> Callable[[PeftModel], Any]:
    """Wrap each layer, then shard."""

    def apply(model: PeftModel) -> nn.Module:
        layers = plain_layers(model)
        for number, layer in enumerate(layers):
            layers[number] = wrap(layer)
        return sharded(model)

    return apply


def sharded(model: PeftModel, shape: tuple[int, ...] = (2,), **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in plain_layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_at_every_module(model: PeftModel) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__ == "Linear" and hasattr(module, "lora_A"):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return sharded(model)


def evaluated_in_another_dtype(model: PeftModel) -> nn.Module:
    """After the forward the parameters stay unsharded, in the policy's dtype; these must not be merged."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded(model, mp_policy=policy, reshard_after_forward=False)
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([[3, 4, 5]]))
    return model


WRAPPINGS: dict[str, Callable[[PeftModel], Any]] = {
    "FSDP2": sharded,
    "checkpoint wrappers": on_layers(checkpoint_wrapper),
    "compiled layers": on_layers(lambda layer: torch.compile(layer)),
    "compiled whole": lambda model: torch.compile(sharded(model)),
    "a unit for every adapted module": sharded_at_every_module,
    "one unit": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    "HSDP": lambda model: sharded(model, (2, 1)),
    "not sharded again after forward": lambda model: sharded(model, reshard_after_forward=False),
    "mixed precision, just evaluated": evaluated_in_another_dtype,
    "the base as a unit": lambda model: (fully_shard(base_model(model)), model)[1],
    "DDP": DistributedDataParallel,
}


def publish_wrapped(directory: Path) -> dict[str, Path]:
    published = {}
    for name, wrap in WRAPPINGS.items():
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        root = make(directory, "some layers, no task")
        root = wrap(root) if dist.is_initialized() else root
        path = directory / f"wrapped-{dist.is_initialized()}-{name}"
        exchange = Exchange.open(path, base=directory / "tiny") if is_first else None
        with Publisher(root, exchange) as publisher:
            version = publisher.publish(1).wait()
        published[name] = version.path
        if not dist.is_initialized():
            root.save_pretrained(directory / "peft")
            break
    return published


@pytest.fixture(scope="module")
def wrapped(directory: Path) -> dict[str, Path]:
    """Every wrapping on two ranks; "plain": one process."""
    (plain,) = run_on_ranks(publish_wrapped, directory, world_size=1)
    return {"plain": plain["FSDP2"]} | run_on_ranks(publish_wrapped, directory, world_size=2)[0]


@pytest.mark.parametrize("name", WRAPPINGS)
def test_no_wrapping_shows_in_a_version(directory, wrapped, name):
    plain, other = wrapped["plain"], wrapped[name]
    files = sorted(path.relative_to(plain) for path in plain.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    for file in files:
        if file.name != "manifest.json":
            assert (plain / file).read_bytes() == (other / file).read_bytes(), file
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (directory / "peft" / file).read_bytes() == (other / "adapter" / file).read_bytes()


@pytest.mark.parametrize("name", WRAPPINGS)
def test_the_manifest_names_the_adapters_modules_without_wrappers(wrapped, name):
    manifest = json.loads((wrapped[name] / "manifest.json").read_text())
    modules = [(m["name"], m["rank"], m["scaling"]) for m in manifest["adapter"]["modules"]]
    assert modules == [(f"model.layers.1.self_attn.{x}_proj", 4, 2.0) for x in "qv"]


def test_the_adapters_config_keeps_the_order_of_pefts_sets(directory, tmp_path):
    pairs = ({f"a{n}", f"b{n}"} for n in range(10_000))
    unstable = next(pair for pair in pairs if list(copy.deepcopy(pair)) != list(pair))
    model = make(directory, "some layers, no task")
    view = AdapterView(model, {})
    model.peft_config["default"].target_modules = unstable
    model.save_pretrained(tmp_path)
    assert view.config_bytes("unused") == (tmp_path / "adapter_config.json").read_bytes()
