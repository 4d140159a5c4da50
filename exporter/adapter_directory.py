"""The adapter directory of a version: byte for byte what PEFT's save_pretrained writes in one process.

PEFT selects the tensors and their names itself, on a view of the model without wrappers: on the live one PEFT
0.21 finds nothing below FSDP1 and checkpoint wrappers, and says nothing; and torch.compile's names leak into
the keys. Follows peft 0.21, peft_model.py `save_pretrained`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict

from ..shared.digest import sha256_hex
from ..shared.errors import UnsupportedError
from ..shared.manifest import AdapterEntry, AdapterModule
from ..shared.publication import Publication
from ..shared.tensor_bytes import bytes_of, spec_of
from ..shared.tensor_files import TensorSpec, plan_file
from .fsdp1 import whole_shape
from .layer_clone import plain_clone

ADAPTER_DIR = "adapter"
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"


class AdapterView:
    """The one active adapter of a model as it is now; refers to the live tensors, which may be sharded.

    `known_keys` (adapter -> saved name -> name in the state dict, or the tensor itself where it is not in
    there) is filled at the first view of an adapter and spares later ones PEFT's selection, which may ask a
    model hub about the base.
    """

    def __init__(self, model: PeftModel, known_keys: dict[str, dict[str, str | torch.Tensor]]) -> None:
        if len(model.active_adapters) != 1:
            raise UnsupportedError(
                f"{len(model.active_adapters)} adapters are active; an adapter directory holds one: "
                "publish 'merged', or activate one"
            )
        (self._adapter,) = model.active_adapters
        self._view: PeftModel = plain_clone(model, lambda tensor: tensor)
        state: dict[str, torch.Tensor] = self._view.state_dict(keep_vars=True)
        if self._adapter not in known_keys:
            known_keys[self._adapter] = _saved_keys(self._view, self._adapter, state)
        found = sorted(known_keys[self._adapter].items())
        self.tensors = {name: state[key] if isinstance(key, str) else key for name, key in found}
        if empty := [name for name, tensor in self.tensors.items() if 0 in whole_shape(tensor)]:
            raise UnsupportedError(
                f"adapter tensor {empty[0]} has no elements; give the publisher the outermost sharded module"
            )

    def in_file_order(self) -> list[torch.Tensor]:
        """The live tensors, each for one place of the file, in the order in which they are written."""
        return [self.tensors[slot.spec.name] for slot in plan_file(self._specs()).slots]

    def _specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, dtype=spec_of(name, tensor).dtype, shape=tuple(whole_shape(tensor)))
            for name, tensor in self.tensors.items()
        ]

    def write(
        self, publication: Publication, in_turn: Iterator[torch.Tensor], base_name: str
    ) -> AdapterEntry:
        """Write weights and config below `adapter/`; returns the manifest's entry.

        `in_turn`: the whole tensors, in file order; each is written before the next is asked for.
        """
        path = f"{ADAPTER_DIR}/{WEIGHTS_NAME}"
        publication.write_tensor_file(path, self._specs(), (bytes_of(tensor) for tensor in in_turn))
        config = self.config_bytes(base_name)
        publication.write_file(f"{ADAPTER_DIR}/{CONFIG_NAME}", config)
        return AdapterEntry(
            dir=f"{publication.relative_dir}/{ADAPTER_DIR}",
            config_sha256=sha256_hex(config),
            modules=tuple(self.modules()),
        )

    def config_bytes(self, base_name: str) -> bytes:
        """adapter_config.json as PEFT writes it, its base always named."""
        # Shallow: PEFT writes sets in the order they have, which a deep copy may change.
        config = copy.copy(self._view.peft_config[self._adapter])
        config.inference_mode = True
        base = self._view.get_base_model()
        own_name = base.__dict__.get("name_or_path")
        config.base_model_name_or_path = config.base_model_name_or_path or own_name or base_name
        mapping = None
        if config.task_type is None:  # PEFT then says which class the adapter is for
            mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory, auto_mapping_dict=mapping)
            return (Path(directory) / CONFIG_NAME).read_bytes()

    def modules(self) -> list[AdapterModule]:
        """Every adapted module with its rank and scaling, under its name in the base model."""
        modules = []
        for name, module in self._view.get_base_model().named_modules():
            scaling, rank = getattr(module, "scaling", {}), getattr(module, "r", {})
            is_adapted = isinstance(scaling, dict) and isinstance(rank, dict)
            if is_adapted and self._adapter in scaling and self._adapter in rank:
                own_rank, own_scaling = rank[self._adapter], float(scaling[self._adapter])
                modules.append(AdapterModule(name=name, rank=own_rank, scaling=own_scaling))
        return sorted(modules, key=lambda module: module.name)


def _saved_keys(
    view: PeftModel, adapter: str, state: dict[str, torch.Tensor]
) -> dict[str, str | torch.Tensor]:
    """Which tensors PEFT saves: name in the file -> name in the state dict, or the tensor itself."""
    places: dict[int, str | torch.Tensor] = {id(tensor): tensor for tensor in _kept_in_dicts(view)}
    places |= {id(tensor): key for key, tensor in state.items()}
    selected = get_peft_model_state_dict(view, state_dict=state, adapter_name=adapter)
    if not selected:
        raise UnsupportedError(
            f"PEFT finds no tensor of adapter {adapter!r} in this model; it is wrapped in a way that is not "
            "known here: make the publisher before you wrap it"
        )
    if computed := sorted(name for name, tensor in selected.items() if id(tensor) not in places):
        raise UnsupportedError(
            f"PEFT computes {computed[0]} when it saves adapter {adapter!r}, which cannot be done shard by "
            'shard; publish the merged weights alone (publish="merged")'
        )
    return {name: places[id(tensor)] for name, tensor in selected.items()}


def _kept_in_dicts(model: PeftModel) -> Iterator[torch.Tensor]:
    """Tensors that are neither parameters nor buffers; SHiRA keeps its indices like this."""
    values = [value for module in model.modules() for value in vars(module).values()]
    dicts = [value for value in values if isinstance(value, dict)]
    return (item for value in dicts for item in value.values() if isinstance(item, torch.Tensor))
