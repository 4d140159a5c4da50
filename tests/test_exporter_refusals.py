"""What cannot be published right is refused before the first step, with the reason and the way out."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exporter_ranks import Case, build
from peft import (
    ArrowConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TaskType,
    VBLoRAConfig,
    create_arrow_model,
    get_peft_model,
)
from peft.tuners import lora
from tiny_model import make_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from weightferry.exporter.checkpoint_files import config_bytes, side_files
from weightferry.exporter.model_walk import base_model
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import BaseMismatchError, ConfigError, UnsupportedError
from weightferry.shared.exchange import Exchange

Q: dict[str, Any] = {"target_modules": ["q_proj"]}
VECTORS: dict[str, Any] = {"r": 4, "num_vectors": 16, "vector_length": 4, "topk": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refusals")
    make_tiny_model(path / "tiny")
    return path


def load(directory: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory / "tiny", dtype=dtype, **config)


def adapted(directory: Path, **settings: Any) -> Any:
    return build(Case(base="tiny", lora=Q | settings), directory)


def arrow(directory: Path) -> PeftModel:
    """A router over two saved adapters."""
    for name in ("one", "two"):
        adapted(directory).save_pretrained(str(directory / name))
    places = [str(directory / name) for name in ("one", "two")]
    return create_arrow_model(load(directory), places, arrow_config=ArrowConfig(top_k=1))


def replicated(directory: Path) -> PeftModel:
    model = adapted(directory)
    model.peft_config["default"].layer_replication = [(0, 2), (1, 2)]
    return model


def quantised(directory: Path) -> PeftModel:
    class Linear4bit(nn.Linear):
        """As bitsandbytes names its own."""

    model = adapted(directory)
    base_model(model).model.layers[1].mlp.down_proj = Linear4bit(256, 128, bias=False)
    return model


def prompts(directory: Path) -> PeftModel:
    return get_peft_model(
        load(directory), PromptTuningConfig(num_virtual_tokens=4, task_type=TaskType.CAUSAL_LM)
    )


# What is published, by which kinds it is refused, and the words of reason and way out.
REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "aLoRA": (
        lambda d: adapted(d, alora_invocation_tokens=[3]),
        ("merged", "both"),
        r"aLoRA, which cannot be merged; .*publish=\"adapter\"",
    ),
    "Arrow": (arrow, ("merged",), r"Arrow router, which cannot be merged"),
    "prompts": (prompts, ("merged",), r"learns prompts, which cannot be merged"),
    "replication": (replicated, ("merged",), r"layer_replication.* save the replicated base"),
    "bias without a place": (
        lambda d: adapted(d, target_modules=["o_proj"], lora_bias=True),
        ("merged", "both"),
        r"o_proj has no bias that lora_bias=True could be merged into; .* set lora_bias=False",
    ),
    "OLoRA": (
        lambda d: build(Case(base="tiny", lora=Q | {"init_lora_weights": "olora"}), d, dtype=torch.float32),
        ("adapter", "both"),
        r"init_lora_weights='olora', which changes the base .* Use init_lora_weights=true .* or publish",
    ),
    "KaSA": (
        lambda d: adapted(d, target_modules=["q_proj"], kasa_config=lora.KasaConfig()),
        ("adapter", "both"),
        r"adapter 'default' has kasa_config, which changes the base .* without kasa_config, or publish",
    ),
    "computed when saved": (
        lambda d: get_peft_model(load(d), VBLoRAConfig(**Q, **VECTORS, save_only_topk_weights=True)),
        ("adapter", "both"),
        r"PEFT computes \S+ when it saves adapter 'default', .* publish the merged weights alone",
    ),
    "quantised": (
        quantised,
        ("merged", "adapter"),
        r"layers\.1\.mlp\.down_proj is a quantised Linear4bit: .* load it without quantization",
    ),
    "no adapter": (load, ("merged",), r"a PEFT model is published .* not a Qwen2ForCausalLM"),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(n, kind) for n, (_, kinds, _) in REFUSED.items() for kind in kinds]
)
def test_what_cannot_be_merged_is_refused_at_the_start(directory, tmp_path, name, kind):
    make, _, words = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(directory)
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(UnsupportedError, match=words):
        Publisher(model, exchange, publish=kind)
    assert exchange.versions() == []
    assert not (exchange.path / "writer.json").exists()


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed", "ignore:.*LoRA tensor.* invalid shape")
@pytest.mark.parametrize("name", ["aLoRA", "bias without a place"])
def test_its_adapter_alone_may_still_be_published(directory, tmp_path, name):
    model = REFUSED[name][0](directory)
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with Publisher(model, exchange, publish="adapter") as publisher:
        version = publisher.publish(1).wait()
    model.save_pretrained(tmp_path / "peft")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (version.path / "adapter" / file).read_bytes() == (tmp_path / "peft" / file).read_bytes()


@pytest.mark.parametrize("kind", ["QuantLinearGPTQ", "EetqLinear", "Linear8bitLt", "HQQLinear", "AwqGEMM"])
def test_every_quantised_layer_is_known_by_its_name(directory, tmp_path, kind):
    """The packages behind them need GPUs of their own; their classes are known by name alone."""
    model = adapted(directory)
    mlp = base_model(model).model.layers[0].mlp
    mlp.up_proj.__class__ = type(kind, (nn.Linear,), {})
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(UnsupportedError, match=rf"up_proj is a quantised {kind}: .* without quantization"):
        Publisher(model, exchange, publish="merged")


@pytest.mark.parametrize("start", ["corda", "loftq", "lora_ga"])
def test_starts_that_change_the_base_by_means_not_tried_here_are_refused(directory, tmp_path, start):
    model = adapted(directory)
    model.peft_config["default"].init_lora_weights = start
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(
        UnsupportedError, match=rf"init_lora_weights='{start}', .* Use init_lora_weights=true"
    ):
        Publisher(model, exchange, publish="merged")


def test_a_tuner_that_no_rule_knows_is_tried_before_it_is_accepted(directory, tmp_path):
    model = adapted(directory)
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    never = mock.patch.object(lora.Linear, "merge", side_effect=NotImplementedError("it never merges"))
    with (
        never,
        pytest.raises(UnsupportedError, match=r"PEFT cannot merge model\.layers\.0\S* .*it never merges"),
    ):
        Publisher(model, exchange, publish="merged")


def test_several_active_adapters_make_no_adapter_directory(directory, tmp_path):
    model = adapted(directory)
    model.add_adapter("second", LoraConfig(**Q))
    model.base_model.set_adapter(["default", "second"])
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(UnsupportedError, match=r"2 adapters are active; .* publish 'merged', or activate"):
        Publisher(model, exchange)


def test_wrong_requests_are_told(directory, tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(ConfigError, match="publish='weights'; expected one of merged, adapter, both"):
        Publisher(adapted(directory), exchange, publish="weights")
    for without_base in (None, Exchange.open(tmp_path / "exchange")):
        with pytest.raises(ConfigError, match="rank 0 must open the exchange with its base"):
            Publisher(adapted(directory), without_base)


def test_a_base_that_is_not_the_exchanges_is_refused_naming_a_few_tensors(directory, tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    model = adapted(directory)
    with torch.no_grad():
        for layer in base_model(model).model.layers:
            layer.self_attn.k_proj.weight[0, 0] += 1  # beside the adapters
            layer.self_attn.q_proj.base_layer.weight[0, 0] += 1  # below them
    with pytest.raises(
        BaseMismatchError, match=r"\.k_proj\.weight \(other values\).* and 1 more; load it"
    ) as caught:
        Publisher(model, exchange, publish="adapter")
    assert "q_proj" in str(caught.value)


def test_a_base_in_a_dtype_that_loses_values_is_refused_and_in_a_wider_one_accepted(directory, tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    narrow = get_peft_model(
        load(directory, torch.bfloat16).to(torch.float8_e5m2).to(torch.bfloat16), LoraConfig(**Q)
    )
    with pytest.raises(BaseMismatchError, match="other values"):
        Publisher(narrow, exchange)
    Publisher(get_peft_model(load(directory, torch.float32), LoraConfig(**Q)), exchange).close()
    moved = get_peft_model(load(directory, torch.float32), LoraConfig(**Q))
    with torch.no_grad():
        base_model(moved).model.norm.weight[0] += 2**-20  # invisible in bfloat16
    with pytest.raises(BaseMismatchError, match=r"norm\.weight \(its values are none of BF16\)"):
        Publisher(moved, exchange)


def test_a_model_of_fewer_layers_than_its_base_is_refused(directory, tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    model = get_peft_model(load(directory, num_hidden_layers=1), LoraConfig(**Q))
    with pytest.raises(
        BaseMismatchError, match=r"lacks model\.layers\.1\..* and \d+ more, which .* own config"
    ):
        Publisher(model, exchange)


def test_a_refused_publisher_leaves_the_exchange_to_the_next(directory, tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=directory / "tiny")
    with pytest.raises(UnsupportedError):
        Publisher(adapted(directory, alora_invocation_tokens=[3]), exchange)
    with Publisher(adapted(directory), exchange) as publisher:
        assert publisher.publish(1).wait().step == 1


def test_a_version_is_a_complete_directory_without_what_loaders_would_trip_over(directory, tmp_path):
    base = shutil.copytree(directory / "tiny", tmp_path / "base")
    for name in ("adapter_config.json", "pytorch_model.bin.index.json", "my notes.txt"):
        (base / name).write_text("{}")
    exchange = Exchange.open(tmp_path / "exchange", base=base)
    with Publisher(adapted(directory), exchange) as publisher:
        version = publisher.publish(1).wait()
    assert {path.name for path in version.path.iterdir()} == {
        *("layer-00000.safetensors", "layer-00000.same.safetensors"),
        *("layer-00001.safetensors", "layer-00001.same.safetensors"),
        *("outer.same.safetensors", "model.safetensors.index.json", "manifest.json", "adapter"),
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    assert (version.path / "config.json").read_bytes() == (base / "config.json").read_bytes()
    names = [name for name, _ in side_files(base, is_untied=False)]
    assert len(names) == len(set(names))


def test_the_config_drops_what_merged_weights_are_not():
    config = {
        "architectures": ["FSDPQwen2ForCausalLM"],
        "quantization_config": {"quant_method": "gguf"},
        "text_config": {"tie_word_embeddings": True, "hidden_size": 8},
        "tie_word_embeddings": True,
    }
    found = json.loads(config_bytes(json.dumps(config).encode(), is_untied=True))
    assert found == {
        "architectures": ["Qwen2ForCausalLM"],
        "text_config": {"tie_word_embeddings": False, "hidden_size": 8},
        "tie_word_embeddings": False,
    }
    plain = json.dumps({"architectures": ["Qwen2ForCausalLM"]}).encode()
    assert config_bytes(plain, is_untied=False) is plain
