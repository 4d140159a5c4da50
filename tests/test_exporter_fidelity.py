"""What the rounding leaves of an update, by module and in total (format.md [6])."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporter_ranks import Case, build
from safetensors.torch import load_file
from tiny_model import make_tiny_model

from weightferry.exporter.fidelity import Fidelity, measure, summary
from weightferry.exporter.publisher import Publisher
from weightferry.shared.exchange import Exchange


@pytest.fixture(scope="module")
def manifest_and_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    path = tmp_path_factory.mktemp("fidelity")
    base = make_tiny_model(path / "tiny")
    model = build(Case(base="tiny", lora={"target_modules": ["q_proj", "down_proj"], "r": 2}), path)
    with Publisher(model, Exchange.open(path / "exchange", base=base)) as publisher:
        version = publisher.publish(1).wait()
    assert version.manifest.fidelity is not None
    return version.manifest.fidelity, base, version.path


def test_the_figures_follow_from_the_files(manifest_and_files):
    fidelity, base_dir, version = manifest_and_files
    base = load_file(base_dir / "model.safetensors")
    factors = load_file(version / "adapter" / "adapter_model.safetensors")
    delta_squared = 0.0
    for layer, name in ((0, "self_attn.q_proj"), (1, "mlp.down_proj")):
        module = f"model.layers.{layer}.{name}"
        a, b = (factors[f"base_model.model.{module}.lora_{x}.weight"].double() for x in "AB")
        weight, delta = base[f"{module}.weight"].double(), 4.0 * (b @ a)
        found = load_file(version / f"layer-0000{layer}.safetensors")[f"{module}.weight"].double()
        assert fidelity["modules"][f"{module}.weight"] == {
            "delta_norm": pytest.approx(float(delta.norm())),
            "relative_error": pytest.approx(float((found - weight - delta).norm() / delta.norm()), rel=1e-6),
            "share_equal_to_base": pytest.approx(float((found == weight).double().mean())),
        }
        delta_squared += float(delta.norm() ** 2)
    assert fidelity["total"]["delta_norm"] > delta_squared**0.5
    assert 0 < fidelity["total"]["relative_error"] < 0.1
    assert 0 < fidelity["total"]["share_equal_to_base"] < 0.2


def test_every_merged_tensor_is_measured_and_no_other(manifest_and_files):
    names = [f"model.layers.{n}.{m}" for n in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")]
    tensors = {f"{name}.weight" for name in names} | {f"{name}.bias" for name in names if "q_proj" in name}
    assert set(manifest_and_files[0]["modules"]) == tensors


def test_an_update_below_the_rounding_is_seen_to_be_lost():
    base = torch.ones(4, dtype=torch.bfloat16)
    merged = base.double() + torch.tensor([2**-12, 0.0, 2**-12, 1.0], dtype=torch.float64)
    figures = measure(base, merged, merged.to(torch.bfloat16))
    assert figures.to_json()["share_equal_to_base"] == 0.75
    assert figures.error_squared == 2 * 2**-24
    lost = summary({"a": figures, "b": Fidelity(delta_squared=4.0, error_squared=4.0, num_elements=4)})
    assert lost["total"]["share_equal_to_base"] == 0.375
    assert lost["modules"]["b"]["relative_error"] == 1.0
