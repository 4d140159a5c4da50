"""The merge rule, block by block: the bits of docs/format.md's one line of torch, whatever the shape."""

from __future__ import annotations

import pytest
import torch

from weightferry.shared.merge import BLOCK_VALUES, merge_rounded, round_merged

SHAPES = [
    (1, 1),
    (3, 5),
    (700, 300),
    (2, BLOCK_VALUES),
    (1, BLOCK_VALUES + 7),
    (BLOCK_VALUES + 1, 2),
    (0, 4),
    (4, 0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 16, 61])
def test_blocks_have_the_bits_of_the_whole_matrix(shape, dtype, rank):
    generator = torch.Generator().manual_seed(rank)
    w = torch.randn(*shape, generator=generator).to(dtype)
    a = torch.randn(rank, shape[1], generator=generator)
    b = torch.randn(shape[0], rank, generator=generator).bfloat16()
    merged = merge_rounded(w, a, b, 0.7)
    expected = (w.double() + 0.7 * (b.double() @ a.double())).to(dtype)
    assert (merged.dtype, merged.shape) == (dtype, w.shape)
    assert torch.equal(merged.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_was_computed_in_less_than_float64_is_not_rounded(dtype):
    with pytest.raises(TypeError, match=r"rounds from torch\.float64"):
        round_merged(torch.zeros(2, 2, dtype=dtype), torch.bfloat16)
