"""Safetensors headers: our layout is safetensors' own, and nothing unsound is read."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightferry.shared.errors import IntegrityError
from weightferry.shared.tensor_files import TensorSpec, plan_file, read_header


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some.safetensors"
    dtypes = ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "u1", "<u2", "<u4", "<u8", "?"]
    tensors = {f"t{i}": np.ones((2, i + 1), dtype=dtype) for i, dtype in enumerate(dtypes)}
    save_file(tensors | {"é/ü": np.zeros(3, dtype="<f4")}, path, metadata={"format": "pt"})
    return path


def test_a_planned_header_is_byte_identical_to_safetensors_own(file):
    plan = plan_file(slot.spec for slot in read_header(file).values())
    data = file.read_bytes()
    assert data.startswith(plan.header)
    assert plan.size_bytes == len(data)


def test_golden_bytes_of_a_header():
    plan = plan_file([TensorSpec(name="w", dtype="BF16", shape=(2, 3))])
    text = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    assert plan.header == (96).to_bytes(8, "little") + text + b" " * (96 - len(text))
    assert plan.size_bytes == 8 + 96 + 12


@pytest.mark.parametrize("kept", [0, 5, 8, 60, -1])
def test_a_cut_file_is_refused(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(IntegrityError, match=r"some\.safetensors"):
        read_header(file)


def test_surplus_bytes_are_refused_with_both_sizes(file):
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match=f"{size} expected, {size + 1} found"):
        read_header(file)


def test_a_header_that_lies_about_an_extent_is_refused(file):
    data = file.read_bytes().replace(b'"shape":[2,1]', b'"shape":[2,2]')
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="wrong extent"):
        read_header(file)


def test_a_missing_file_is_an_integrity_error(tmp_path):
    with pytest.raises(IntegrityError, match="is missing"):
        read_header(tmp_path / "absent.safetensors")
