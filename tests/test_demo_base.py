"""The demo's base is an ordinary checkpoint directory, made once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightferry.examples import demo_base
from weightferry.examples.demo_base import RECIPE, make_base, make_tokenizer
from weightferry.examples.kept_base import RECIPE_NAME
from weightferry.shared.checkpoint import Checkpoint


@pytest.fixture
def quick_recipe(monkeypatch):
    """One step of training, which is enough of a base for what is tested here."""
    monkeypatch.setitem(RECIPE, "enough_accuracy", 0.0)
    monkeypatch.setattr(demo_base, "CHECK_EVERY_STEPS", 1)


def test_the_base_is_a_checkpoint_that_transformers_loads(tmp_path, quick_recipe):
    directory = make_base(tmp_path / "base", print)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.num_parameters() < 400_000
    assert {spec.dtype for spec in Checkpoint.open(directory).specs.values()} == {"BF16"}
    assert (
        AutoTokenizer.from_pretrained(directory)("07+45=").input_ids == make_tokenizer()("07+45=").input_ids
    )


def test_every_character_is_one_token_and_comes_back(quick_recipe):
    tokenizer = make_tokenizer()
    ids = tokenizer("07+45=250<eos>").input_ids
    assert len(ids) == 10
    assert len(tokenizer("text").input_ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "07+45=250"


def test_a_whole_base_is_used_again_and_a_half_made_one_is_not(tmp_path, quick_recipe):
    said: list[str] = []
    make_base(tmp_path / "base", said.append)
    make_base(tmp_path / "base", said.append)
    assert "made earlier" in said[-1]
    (tmp_path / "base" / RECIPE_NAME).unlink()
    make_base(tmp_path / "base", said.append)
    assert "made earlier" not in said[-1]


def test_a_base_of_another_recipe_is_made_anew(tmp_path, quick_recipe, monkeypatch):
    make_base(tmp_path / "base", print)
    monkeypatch.setitem(RECIPE, "seed", 1)
    make_base(tmp_path / "base", print)
    assert json.loads((tmp_path / "base" / RECIPE_NAME).read_text())["seed"] == 1


def test_a_base_that_does_not_learn_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPE, "max_steps", 2)
    with pytest.raises(demo_base.WeightferryError, match="did not reach 30%"):
        make_base(tmp_path / "base", print)
