"""A staged file holds what the manifest says of it: these names, in these shapes and dtypes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightferry.rollout_server.weights import require_header
from weightferry.shared.errors import IntegrityError
from weightferry.shared.tensor_files import TensorSpec

SPECS = {name: TensorSpec(name=name, dtype="F32", shape=(2, 3)) for name in ("a", "b")}
WHOLE = {name: np.zeros((2, 3), dtype=np.float32) for name in SPECS}
WRONG = {
    "another shape": (WHOLE | {"b": np.zeros((3, 2), dtype=np.float32)}, "b"),
    "another dtype of the same size": (WHOLE | {"b": np.zeros((2, 3), dtype=np.int32)}, "b"),
    "a tensor too many": (WHOLE | {"c": WHOLE["a"]}, "c"),
    "a tensor too few": ({"a": WHOLE["a"]}, "b"),
}


def saved(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, directory / "layer.safetensors")
    return directory / "layer.safetensors"


def test_what_the_manifest_says_is_accepted(tmp_path):
    require_header(saved(tmp_path, WHOLE), SPECS)


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_otherwise_is_named(tmp_path, kind):
    tensors, name = WRONG[kind]
    with pytest.raises(IntegrityError, match=re.escape(f"{name} is not what the manifest says")):
        require_header(saved(tmp_path, tensors), SPECS)
