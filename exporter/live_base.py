"""Whether the base inside the model in training is the exchange's base, bit for bit.

Asked when a publisher is made, for every tensor, and again with each publication for those below adapters:
a merge onto anything else than the base would be wrong without a sign. A tensor may be held in a wider dtype
than the checkpoint's if its values are exactly the checkpoint's. Follows docs/format.md [3].
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..shared.checkpoint import Checkpoint
from ..shared.digest import xxh3_128
from ..shared.errors import BaseMismatchError
from ..shared.tensor_bytes import TORCH_DTYPES, bytes_of
from ..shared.tensor_files import TensorSpec

_NAMED_AT_MOST = 3


class LiveBase:
    """Compares tensors under checkpoint names with one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, digests: dict[str, str]) -> None:
        self._path, self._specs, self._digests = checkpoint.path, checkpoint.specs, digests

    def differing(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """Descriptions of those that are not the checkpoint's."""
        found = ((name, self._difference(self._specs.get(name), name, t)) for name, t in tensors.items())
        return [f"{name} ({difference})" for name, difference in found if difference]

    def differing_in_shape(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        """As `differing`, for tensors that are trained: only their names and shapes must be the base's."""
        specs = {name: self._specs.get(name) for name in tensors}
        return [f"{n} ({_misfit(specs[n], t)})" for n, t in tensors.items() if _misfit(specs[n], t)]

    def require_none(self, differing: Iterable[str], advice: str) -> None:
        """Raise BaseMismatchError that names a few, if there are any."""
        ordered = sorted(differing)
        if ordered:
            raise BaseMismatchError(
                f"the model in training differs from {self._path} in {some(ordered)}; {advice}"
            )

    def _difference(self, spec: TensorSpec | None, name: str, live: torch.Tensor) -> str:
        if (misfit := _misfit(spec, live)) or spec is None:
            return misfit
        stored = live.to(TORCH_DTYPES[spec.dtype])
        if not torch.equal(stored.to(live.dtype), live):
            return f"its values are none of {spec.dtype}"
        return "" if xxh3_128(bytes_of(stored)) == self._digests[name] else "other values"


def _misfit(spec: TensorSpec | None, live: torch.Tensor) -> str:
    if spec is None:
        return "there is no such tensor"
    shape = tuple(live.shape)
    return "" if shape == spec.shape else f"{list(spec.shape)} expected, {list(shape)} found"


def some(names: Iterable[str]) -> str:
    """A few names of many, for an error."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED_AT_MOST} more" if len(ordered) > _NAMED_AT_MOST else ""
    return ", ".join(ordered[:_NAMED_AT_MOST]) + more
