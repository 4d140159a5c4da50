"""The `exact` merge rule, docs/format.md [4]: computed in float64, then converted once to the stored dtype.

A merged weight is `(W.double() + s * (B.double() @ A.double())).to(d)`: one line of torch that anybody can
run to check a version. float64 products make the bits independent of world size, sharding and blocking.
torch converts float64 to a 16-bit dtype by way of float32; docs/decisions/001-exact-rounding.md has the
measured consequence and why the checkable line is the rule.
"""

from __future__ import annotations

import torch

COMPUTE_DTYPE = torch.float64
BLOCK_VALUES = 1 << 17  # 1 MiB in float64: a block and its intermediate values stay in the processor's cache


def merge_lora(
    weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """A linear layer's merged weight [out, in] in float64, from A [r, in] and B [out, r], not yet rounded.

    The same operations in the same order as PEFT's on a float64 copy of the layer, which the exporter uses.
    """
    wide_a, wide_b = lora_a.to(COMPUTE_DTYPE), lora_b.to(COMPUTE_DTYPE)
    return weight.to(COMPUTE_DTYPE) + (wide_b @ wide_a) * scaling


def round_merged(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A merged tensor, computed in float64, in the dtype that the base checkpoint stores it in."""
    if value.dtype != COMPUTE_DTYPE:
        raise TypeError(f"the exact rule rounds from {COMPUTE_DTYPE}, got {value.dtype}")
    return value.to(dtype)


def merge_rounded(
    weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The same, rounded to the weight's own dtype, some rows at a time: bit for bit that of the whole matrix.

    float64 copies of a whole matrix would each go to memory and back.
    """
    wide_a, merged = lora_a.to(COMPUTE_DTYPE), torch.empty_like(weight)
    num_rows = max(1, BLOCK_VALUES // max(1, weight.shape[1]))
    for begin in range(0, len(weight), num_rows):
        rows = slice(begin, begin + num_rows)
        block = merge_lora(weight[rows], wide_a, lora_b[rows], scaling)
        merged[rows] = round_merged(block, weight.dtype)
    return merged
