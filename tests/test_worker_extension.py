"""A load that fails in the worker is an answer, not an exception, and the next good load is exact."""

from __future__ import annotations

import pytest
from failing_reloads import PROMPTS, tell_story
from fresh_engine import ask_fresh_engines
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_after_any_failed_load_a_full_load_of_good_weights_is_exact(tmp_path):
    base, other = make_tiny_model(tmp_path / "base"), make_tiny_model(tmp_path / "other", seed=1)
    story = tell_story(base, other, tmp_path)
    of_base, of_other = ask_fresh_engines(PROMPTS, [(base, None), (other, None)])
    assert of_base != of_other
    failed = [(what, answer) for what, answer, _ in story if what.startswith("a ")]
    assert len(failed) == 5
    for what, answer in failed:
        assert not answer["ok"], what
        assert answer["error"], what
    expected = {"base": of_base, "other": of_other, "nothing": of_other}
    for position, (what, answer, tokens) in enumerate(story):
        if what in expected:
            assert answer["ok"], (position, answer)
            assert tokens == expected[what], f"{what} after {story[position - 1][0]}"
