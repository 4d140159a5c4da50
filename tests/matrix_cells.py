"""One cell of the matrix: publish an adapted model in some sharding, and compare with what one process makes.

The reference knows nothing of the exporter: a float64 copy of the whole model, its ties cut, merged by PEFT's
merge_and_unload, renamed by transformers, rounded once; PEFT's own save_pretrained; and the logits of the
live model. A cell's outcome is the empty text, or what is wrong in it.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix_families import FAMILIES, IDS, load, save_base
from matrix_shardings import SHARDINGS
from matrix_variants import VARIANTS, adapt
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import UnsupportedError
from weightferry.shared.exchange import Exchange

# What the logits of the exported directory may be off the live adapter model's, both computed in float32: the
# rounding of the merged weights to bfloat16, as a part of the largest logit ...
LOGITS_BOUND = 2**-5
# ... and as a part of what the adapter itself moves.
MOVE_BOUND = 1 / 2
# The same for the reference before it is rounded.
EXACT_BOUND = 2**-13
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """A place in the matrix."""

    family: str
    variant: str
    sharding: str

    @property
    def applies(self) -> bool:
        variant = VARIANTS[self.variant]
        return self.family not in variant.without and bool(variant.configs(FAMILIES[self.family]))

    @property
    def is_float32(self) -> bool:
        """Whether the base is widened, by whatever side of the cell."""
        return any(
            side.is_float32
            for side in (VARIANTS[self.variant], FAMILIES[self.family], SHARDINGS[self.sharding])
        )

    @property
    def reference(self) -> str:
        """One directory of references serves all cells that train the same."""
        return f"{self.family}--{self.variant}--{'float32' if self.is_float32 else 'bfloat16'}"

    def __str__(self) -> str:
        return f"{self.family} / {self.variant} / {self.sharding}"


def prepare(directory: Path, cells: list[Cell]) -> list[str]:
    """Write the base of each cell's family and its reference, unless they are there; what went wrong."""
    logging.disable_progress_bar()
    outcomes = []
    for cell in cells:
        if not (directory / cell.family).exists():
            save_base(cell.family, directory / cell.family)
        try:
            if not VARIANTS[cell.variant].refused:
                _write_reference(directory, cell)
            outcomes.append("")
        except Exception as error:
            outcomes.append(f"no reference: {type(error).__name__}: {error}")
    return outcomes


def run_cells(directory: Path, cells: list[Cell]) -> list[str]:
    """The outcomes, in the order of the cells; all are of one world size, the job's. Collective."""
    logging.disable_progress_bar()
    if not dist.is_initialized() and any(SHARDINGS[cell.sharding].world_size for cell in cells):
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    outcomes = []
    for cell in cells:
        torch.compiler.reset()
        try:
            outcomes.append(_run(directory, cell))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def build(directory: Path, cell: Cell) -> Any:
    """The cell's adapted model, in eval mode, whole."""
    dtype = torch.float32 if cell.is_float32 else torch.bfloat16
    base = load(cell.family, directory / cell.family, dtype)
    return adapt(base, VARIANTS[cell.variant], FAMILIES[cell.family]).eval()


def _run(directory: Path, cell: Cell) -> str:
    variant, is_first = VARIANTS[cell.variant], not dist.is_initialized() or dist.get_rank() == 0
    root = SHARDINGS[cell.sharding].apply(build(directory, cell))
    path = directory / "exchanges" / str(cell).replace(" / ", "--")
    exchange = Exchange.open(path, base=directory / cell.family) if is_first else None
    before = _digest(root)
    try:
        with Publisher(root, exchange, publish=variant.publish) as publisher:
            version = publisher.publish(1).wait().path
    except UnsupportedError as error:
        is_right = variant.refused and variant.refused in str(error)
        return "" if is_right else f"refused: {error}"
    if variant.refused:
        return "it was accepted"
    if _digest(root) != before:
        return "the model was changed"
    return _compare(directory, cell, version) if is_first else ""


def _digest(root: nn.Module) -> str:
    """Over every byte that this rank holds of the model."""
    digest = hashlib.sha256()
    for name, tensor in root.state_dict(keep_vars=True).items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _compare(directory: Path, cell: Cell, version: Path) -> str:
    """The first thing in a version that is not the reference's."""
    reference = directory / "references" / cell.reference
    expected, found = weights(reference), weights(version)
    if lost := expected.keys() ^ found.keys():
        return f"names differ: {sorted(lost)[:3]}"
    for name, tensor in found.items():
        if tensor.dtype != expected[name].dtype or tensor.shape != expected[name].shape:
            return f"{name}: {expected[name].dtype} {list(expected[name].shape)} expected"
        if not torch.equal(tensor, expected[name]):
            return f"{name}: {int((tensor != expected[name]).sum())} elements differ"
    if VARIANTS[cell.variant].publish == "both":
        for file in ADAPTER_FILES:
            if (version / "adapter" / file).read_bytes() != (reference / "peft" / file).read_bytes():
                return f"{file} is not PEFT's"
    return _compare_logits(directory, cell, version) if cell.sharding == "unsharded" else ""


def _compare_logits(directory: Path, cell: Cell, version: Path) -> str:
    live, base = load_file(directory / "references" / cell.reference / "logits").values()
    model = load(cell.family, version, torch.float32).eval()
    with torch.no_grad():
        exported = model(input_ids=IDS).logits
    difference = float((exported - live).abs().max())
    scale, move = float(live.abs().max()), float((live - base).abs().max())
    if difference > min(LOGITS_BOUND * scale, MOVE_BOUND * move):
        return f"logits differ by {difference:.3g}, of at most {scale:.3g}, moved by {move:.3g}"
    return ""


def _write_reference(directory: Path, cell: Cell) -> None:
    """The merged checkpoint, PEFT's directory, and the logits of live model ("a") and base ("b")."""
    family, path = cell.family, directory / "references" / cell.reference
    path.mkdir(parents=True)
    live = build(directory, cell)
    merged = _merged(live)
    save_file(_on_disk(merged, weights(directory / family)), path / "merged.safetensors")
    if VARIANTS[cell.variant].publish == "both":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            live.save_pretrained(path / "peft")
    base = load(family, directory / family, torch.float32).eval()
    with torch.no_grad():
        exact = merged.float()(input_ids=IDS).logits
        logits = {"a": live.float()(input_ids=IDS).logits, "b": base(input_ids=IDS).logits}
    save_file(logits, path / "logits")
    if (difference := (exact - logits["a"]).abs().max()) > EXACT_BOUND * exact.abs().max():
        raise AssertionError(f"PEFT's merge is not what its adapter does: {difference:.3g}")


def _merged(live: Any) -> Any:
    """PEFT's merge of a float64 copy without ties."""
    exact = copy.deepcopy(live)
    _cut_ties(exact)
    for tensor in [*exact.parameters(), *exact.buffers()]:
        tensor.data = tensor.data.double() if tensor.is_floating_point() else tensor.data
    return exact.merge_and_unload()


def _on_disk(merged: Any, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the checkpoint's names, in the base's dtypes; equal ties once."""
    state, ties = merged.state_dict(), merged.all_tied_weights_keys or {}
    kept = {name: t for name, t in state.items() if not (name in ties and torch.equal(t, state[ties[name]]))}
    reverted = revert_weight_conversion(merged, kept)
    twin = next((n for n in base if n.endswith(("embed_tokens.weight", "wte.weight"))), "")
    return {
        name: tensor.to(base.get(name, base[twin]).dtype).clone().contiguous()
        for name, tensor in reverted.items()
    }


def _cut_ties(model: nn.Module) -> None:
    """PEFT's merge of one of two tied modules would change both."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(parameter))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a directory, not of those below it."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
