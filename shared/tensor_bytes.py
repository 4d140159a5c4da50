"""Between torch tensors and what the exchange stores: dtype names, and the raw bytes of a tensor."""

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
