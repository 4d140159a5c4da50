"""Between torch tensors and what the exchange stores: dtype names, raw bytes, and whether all is finite."""

from __future__ import annotations

import torch

from .tensor_files import TensorSpec

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The safetensors spec of a tensor under a name."""
    return TensorSpec(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, C order; copies only if it is not contiguous or not in CPU memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite.

    The extremes say it, since NaN is passed on to both: one pass that makes no tensors, where
    isfinite().all() makes several (bfloat16, torch 2.13 on CPU: 22 times as long as a copy, not 0.3).
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # 8-bit floats have no extremes in torch; every value of theirs is one of float16's
    values = tensor.half() if tensor.itemsize == 1 else tensor
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(values))
