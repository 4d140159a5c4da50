"""The policy in memory: its start, its dtypes, what is sharded apart, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ranks import on_ranks
from tiny_model import make_tiny_model
from torch.distributed.fsdp import FSDPModule

from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.errors import (
    BaseCheckpointError,
    ConfigError,
    UnsupportedError,
    WeightferryError,
)
from weightferry.trainer.dataset import check_vocabulary
from weightferry.trainer.example import with_loss_on
from weightferry.trainer.lora_settings import lora_config
from weightferry.trainer.model import load_policy, shard_policy, trained_parameters
from weightferry.trainer.ranks import Ranks
from weightferry.trainer.settings import ModelSettings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny_model(tmp_path_factory.mktemp("trainer-base")))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.delenv("RANK", raising=False)
    with Ranks(timeout_s=30) as world_of_one:
        yield world_of_one


def load(base: Checkpoint, *, seed: int = 0, lora: dict[str, Any] | None = None, **settings) -> PeftModel:
    table = {"r": 4, "target_modules": "all-linear"} if lora is None else lora
    return load_policy(base, ModelSettings(**settings), lora_config(table), seed=seed)


def dtypes(policy: PeftModel) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of the frozen and of the trained parameters."""
    frozen = {parameter.dtype for parameter in policy.parameters() if not parameter.requires_grad}
    return frozen, {parameter.dtype for parameter in trained_parameters(policy)}


def test_the_base_keeps_its_dtype_and_the_adapter_is_float32(base: Checkpoint):
    assert dtypes(load(base)) == ({torch.bfloat16}, {torch.float32})


def test_the_base_can_be_widened(base: Checkpoint):
    assert dtypes(load(base, dtype="float32")) == ({torch.float32}, {torch.float32})


def test_the_dtype_is_that_of_most_of_the_checkpoint_whatever_its_config_says(
    base: Checkpoint, tmp_path: Path
):
    copy = shutil.copytree(base.path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | {"dtype": "float32"}
    (copy / "config.json").write_text(json.dumps(config))
    assert dtypes(load(Checkpoint.open(copy)))[0] == {torch.bfloat16}


def test_the_start_of_the_adapter_depends_on_the_seed_alone(base: Checkpoint):
    def start(seed: int) -> torch.Tensor:
        torch.rand(7)  # whatever was drawn before
        return next(p for name, p in load(base, seed=seed).named_parameters() if "lora_A" in name)

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_each_decoder_layer_and_the_rest_are_units_of_their_own(base: Checkpoint, ranks: Ranks):
    policy = shard_policy(load(base), ranks.mesh())
    units = [type(module).__name__ for module in policy.modules() if isinstance(module, FSDPModule)]
    assert units == ["FSDPPeftModelForCausalLM", "FSDPQwen2DecoderLayer", "FSDPQwen2DecoderLayer"]


def test_a_module_that_is_trained_whole_learns_beside_float32_factors(base: Checkpoint, ranks: Ranks):
    lora = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}
    policy = shard_policy(load(base, lora=lora), ranks.mesh())
    policy(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in trained_parameters(policy))


def test_single_tokens_of_tied_embeddings_learn_in_one_unit(tmp_path: Path, ranks: Ranks):
    tied = Checkpoint.open(make_tiny_model(tmp_path, tied=True))
    lora = {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 40]}
    policy = shard_policy(load(tied, lora=lora), ranks.mesh())
    policy(input_ids=torch.tensor([[3, 4, 40]]), use_cache=False).logits.float().sum().backward()
    assert all(parameter.grad is not None for parameter in trained_parameters(policy))


def test_trained_biases_beside_float32_factors_are_refused_with_the_way_out(base: Checkpoint, ranks: Ranks):
    lora = {"r": 4, "target_modules": ["q_proj"], "bias": "all"}
    with pytest.raises(UnsupportedError, match=r'set model\.dtype = "float32"'):
        shard_policy(load(base, lora=lora), ranks.mesh())
    shard_policy(load(base, lora=lora, dtype="float32"), ranks.mesh())


def test_what_peft_refuses_is_told_as_a_wrong_setting(base: Checkpoint):
    for lora in ({"target_modules": ["c_attn"]}, {"r": 0, "target_modules": "all-linear"}):
        with pytest.raises(ConfigError, match="lora: PEFT cannot put this adapter on"):
            load(base, lora=lora)


def test_a_quantised_base_is_refused(base: Checkpoint, tmp_path: Path):
    copy = shutil.copytree(base.path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "gptq"}
    }
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="is quantised"):
        load(Checkpoint.open(copy))


def test_a_model_that_transformers_does_not_know_is_refused_in_one_line(base: Checkpoint, tmp_path: Path):
    copy = shutil.copytree(base.path, tmp_path / "copy")
    (copy / "config.json").write_text('{"model_type": "of-my-own"}')
    with pytest.raises(UnsupportedError, match=r"cannot load .*of-my-own") as caught:
        load(Checkpoint.open(copy))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused():
    examples = [with_loss_on([1, 2, 97], [range(1, 3)])]
    check_vocabulary(examples, 98)
    with pytest.raises(BaseCheckpointError, match=r"makes token 97 .* its model knows 97"):
        check_vocabulary(examples, 97)


def refuse() -> None:
    raise ConfigError("output_dir: no")


def test_one_process_without_torchrun_is_a_world_of_one_rank(ranks: Ranks):
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.from_first(lambda: 3) == 3
    assert ranks.sum(1, True, 0.5) == [1, 1, 0.5]
    with pytest.raises(ConfigError, match="output_dir: no"):
        ranks.from_first(refuse)


@pytest.fixture
def meeting() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.ranks
@on_ranks(2)
def test_what_the_first_rank_does_and_why_it_failed_reaches_the_other(meeting: str):
    rank = dist.get_rank()
    dist.destroy_process_group()  # in its place come ranks as torchrun starts them
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting}
    with Ranks(timeout_s=30) as ranks:
        assert ranks.from_first(lambda: "made") == ("made" if rank == 0 else None)
        with pytest.raises(WeightferryError, match="output_dir: no") as caught:
            ranks.from_first(refuse)
        assert caught.value.exit_code == 2
        with pytest.raises(Exception, match="disk full"):
            ranks.from_first(lambda: (_ for _ in ()).throw(OSError("disk full")))
        assert ranks.sum(rank + 1, rank == 1) == [3, 1]
