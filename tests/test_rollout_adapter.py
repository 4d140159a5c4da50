"""An adapter is checked whole before vLLM sees it: vLLM takes wrong shapes, dtypes and NaN silently."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightferry.rollout_server.adapter_check import check_adapter, require_said_scaling
from weightferry.shared.errors import ApplyError, IntegrityError
from weightferry.shared.manifest import AdapterEntry, AdapterModule
from weightferry.shared.tensor_files import TensorSpec

MODULE = "model.layers.0.self_attn.q_proj"
BASE = {
    f"{MODULE}.weight": TensorSpec(name=f"{MODULE}.weight", dtype="BF16", shape=(16, 8)),
    "model.norm.weight": TensorSpec(name="model.norm.weight", dtype="BF16", shape=(8,)),
}
ENTRY = AdapterEntry(
    dir="versions/v/adapter", config_sha256="", modules=(AdapterModule(name=MODULE, rank=4, scaling=2.0),)
)
A, B = (f"base_model.model.{MODULE}.lora_{factor}.weight" for factor in "AB")


def write(directory, tensors=None, **config):
    good = {A: np.ones((4, 8), dtype=np.float32), B: np.ones((16, 4), dtype=np.float32)}
    save_file(good if tensors is None else good | tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | config))
    return directory


def test_a_whole_adapter_passes(tmp_path):
    assert check_adapter(write(tmp_path), ENTRY, BASE) == 2


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({A: np.ones((4, 9), dtype=np.float32)}, r"lora_A\.weight: shape \(4, 8\) expected, \(4, 9\) found"),
        (
            {B: np.ones((16, 3), dtype=np.float32)},
            r"lora_B\.weight: shape \(16, 4\) expected, \(16, 3\) found",
        ),
        ({B: np.ones((16, 4), dtype=np.int32)}, r"lora_B\.weight: one of BF16, .* expected, I32 found"),
        ({B: np.full((16, 4), np.inf, dtype=np.float32)}, "is not finite"),
        ({"base_model.model.layers.9.x.lora_A.weight": np.ones((4, 8), dtype=np.float32)}, "None expected"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, tensors, words):
    with pytest.raises(ApplyError, match=words):
        check_adapter(write(tmp_path, tensors), ENTRY, BASE)


def test_a_missing_factor_is_named(tmp_path):
    write(tmp_path)
    save_file({A: np.ones((4, 8), dtype=np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ApplyError, match=r"lora_B\.weight: shape \(16, 4\) expected, None found"):
        check_adapter(tmp_path, ENTRY, BASE)


def test_a_cut_file_is_named(tmp_path):
    file = write(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match=r"adapter_model\.safetensors: has a wrong size"):
        check_adapter(tmp_path, ENTRY, BASE)


@pytest.mark.parametrize(
    "key", ["use_dora", "lora_bias", "modules_to_save", "target_parameters", "use_bdlora", "kasa_config"]
)
def test_what_vllm_cannot_serve_is_refused_with_the_way_out(tmp_path, key):
    with pytest.raises(ApplyError, match="serve with --apply merged"):
        check_adapter(write(tmp_path, **{key: ["x"]}), ENTRY, BASE)


def test_what_vllm_would_take_for_lora_without_a_word_is_refused(tmp_path):
    with pytest.raises(ApplyError, match="this adapter is IA3"):
        check_adapter(write(tmp_path, peft_type="IA3"), ENTRY, BASE)
    with pytest.raises(
        ApplyError, match="with biases is neither served nor folded: serve with --apply merged"
    ):
        check_adapter(write(tmp_path, bias="lora_only"), ENTRY, BASE)


def test_a_module_that_is_no_linear_layer_is_refused_with_the_way_out(tmp_path):
    entry = AdapterEntry(
        dir="d", config_sha256="", modules=(AdapterModule(name="model.norm", rank=4, scaling=1.0),)
    )
    with pytest.raises(ApplyError, match="use --apply merged"):
        check_adapter(write(tmp_path), entry, BASE)


@pytest.mark.parametrize("init", ["pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_changed_its_base_when_it_was_made_is_refused(tmp_path, init):
    with pytest.raises(ApplyError, match="fits what its making left of the base, not the base"):
        check_adapter(write(tmp_path, init_lora_weights=init), ENTRY, BASE)
    assert check_adapter(write(tmp_path, init_lora_weights="gaussian"), ENTRY, BASE) == 2


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"lora_alpha": 8}, True),
        ({"lora_alpha": 4, "use_rslora": True}, True),
        ({"lora_alpha": 8, "r": 9, "rank_pattern": {"q_proj": 4}}, True),
        ({"lora_alpha": 1, "alpha_pattern": {"layers.0.self_attn.q_proj": 8}}, True),
        ({"lora_alpha": 8, "alpha_pattern": {"proj": 1}}, True),  # ends no name at a dot
        ({"lora_alpha": 16}, False),
        ({"lora_alpha": 8, "use_rslora": True}, False),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 1}}, False),
        ({}, False),
    ],
)
def test_a_scaling_that_only_the_live_model_had_is_refused(tmp_path, config, is_right):
    write(tmp_path, **config)
    if is_right:
        require_said_scaling(tmp_path, ENTRY)
    else:
        with pytest.raises(
            ApplyError, match=r"q_proj is scaled by 2\.0 in training, by .* serve with --apply"
        ):
            require_said_scaling(tmp_path, ENTRY)
