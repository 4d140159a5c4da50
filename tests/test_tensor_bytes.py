"""Whether all values of a tensor are finite, from its extremes alone."""

from __future__ import annotations

import pytest
import torch

from weightferry.shared.tensor_bytes import is_finite

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 40001]  # below and above what goes in one step


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_one_value_that_is_none_is_found_wherever_it_stands(dtype, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert is_finite(values)
    for position in {*range(min(size, 70)), size // 2, size - 1}:
        for wrong in (float("nan"), float("inf"), -float("inf")):
            broken = values.clone()
            broken[position] = wrong
            assert not is_finite(broken), (position, wrong)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_are_finite(dtype):
    limits = torch.finfo(dtype)
    assert is_finite(torch.tensor([limits.min, limits.max, limits.tiny], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_enough_to_be_no_number(dtype):
    values = torch.ones(4, 4).to(dtype)
    assert is_finite(values)
    values.view(torch.uint8)[1, 2] = 0x7F  # NaN in both
    assert not is_finite(values)


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.int32), torch.ones(2) > 0, torch.empty(0)])
def test_what_has_no_such_values_is_finite(tensor):
    assert is_finite(tensor)


def test_a_tensor_that_is_not_contiguous_is_looked_at_as_it_is():
    values = torch.zeros(4, 6)
    values[3, 5] = float("nan")
    assert is_finite(values[:, ::5][:3])
    assert not is_finite(values.T[5])
