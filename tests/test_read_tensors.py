"""Reading some tensors of a file: in file order, each in memory of its own, and all of it or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightferry.rollout_server.worker_extension import read_tensors
from weightferry.shared.tensor_files import read_header

TENSORS = {  # the widest dtype is the first in the file
    "z": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.float64),
    "c": torch.full((3, 2), 1.5, dtype=torch.bfloat16),
}


@pytest.fixture
def file(tmp_path) -> Path:
    save_file(TENSORS, tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


@pytest.mark.parametrize("is_given", [False, True])
def test_tensors_come_in_file_order_as_they_were_saved(file, is_given):
    slots = read_header(file)
    order = sorted(TENSORS, key=lambda name: slots[name].begin)
    for names in (order, order[::-1]):
        found = list(read_tensors(file, names, slots if is_given else None))
        assert [name for name, _ in found] == order
        for name, tensor in found:
            assert tensor.shape == TENSORS[name].shape
            assert tensor.dtype == TENSORS[name].dtype
            assert torch.equal(tensor, TENSORS[name])


def test_a_tensor_without_values_has_its_shape(tmp_path):
    save_file({"none": torch.empty(0, 4)}, tmp_path / "none.safetensors")
    ((_, tensor),) = read_tensors(tmp_path / "none.safetensors", ["none"])
    assert tensor.shape == (0, 4)


def test_no_two_tensors_share_memory(file):
    found = dict(read_tensors(file, ["z", "b"]))
    found["z"].zero_()
    assert torch.equal(found["b"], TENSORS["b"])


def test_a_file_that_is_cut_meanwhile_is_an_error_and_not_a_signal(file):
    slots = read_header(file)
    last = max(TENSORS, key=lambda name: slots[name].end)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EOFError, match=f"was cut while {last} was read"):
        list(read_tensors(file, [last], slots))
