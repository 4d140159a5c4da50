"""Opening a base checkpoint: what is wrong with it is said in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_exchange import make_base

from weightferry.shared.base import identify_base
from weightferry.shared.checkpoint import INDEX_NAME, Checkpoint
from weightferry.shared.errors import BaseCheckpointError


@pytest.fixture
def sharded(tmp_path):
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for shard in "ab":
        save_file({shard: np.ones(3, dtype=np.float32)}, directory / f"{shard}.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    return directory


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(BaseCheckpointError, match="has no weights"):
        Checkpoint.open(tmp_path)


def test_a_directory_of_another_format_says_which(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BaseCheckpointError, match=r"pytorch_model\.bin: convert it"):
        Checkpoint.open(tmp_path)


def test_a_hub_id_is_refused_with_the_way_out():
    with pytest.raises(BaseCheckpointError, match="hf download"):
        Checkpoint.open("org/name")


def test_index_and_shards_must_agree_either_way(sharded):
    Checkpoint.open(sharded)
    index = json.loads((sharded / INDEX_NAME).read_text())
    for broken in ({"a": "a.safetensors"}, {**index["weight_map"], "c": "b.safetensors"}):
        wrong = dict(broken) if "c" in broken else {"a": "a.safetensors", "z": "b.safetensors"}
        (sharded / INDEX_NAME).write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(BaseCheckpointError, match="disagrees with the shards"):
            Checkpoint.open(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "b.safetensors").unlink()
    with pytest.raises(BaseCheckpointError, match=r"b\.safetensors: is missing"):
        Checkpoint.open(sharded)


def test_an_index_that_leads_out_of_its_directory_is_refused(sharded):
    (sharded / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(BaseCheckpointError, match="not a file of its own directory"):
        Checkpoint.open(sharded)


def test_identity_depends_on_bytes_and_not_on_place_or_sharding(tmp_path):
    first, _ = identify_base(Checkpoint.open(make_base(tmp_path / "one")))
    moved, _ = identify_base(Checkpoint.open(make_base(tmp_path / "two")))
    other, _ = identify_base(Checkpoint.open(make_base(tmp_path / "three", seed=1)))
    assert first.is_same_as(moved)
    assert not first.is_same_as(other)
