"""What merged_lora refuses: at the start what in place would be wrong, and inside what would confuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporter_ranks import CASES, Case, build, open_exchange, place
from merged_ranks import CASE, Snapshot, differing, flags, logits, make, rank, whole_state
from ranks import on_ranks
from tiny_model import make_tiny_model

from weightferry.exporter.merged_context import merged_lora
from weightferry.exporter.publisher import Publisher
from weightferry.shared.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged-refusals")
    make_tiny_model(path / "tiny")
    make_tiny_model(path / "tied", tied=True)
    return path


def refused_inside(root: Any, directory: Path) -> dict[str, Callable[[], Any]]:
    exchange = open_exchange(place()[0], directory / "refused-inside", directory / "tiny")

    def nest() -> None:
        with merged_lora(root):
            raise AssertionError("it was allowed")

    def disable() -> None:
        with root.disable_adapter():
            raise AssertionError("it was allowed")

    return {
        "nesting": nest,
        "disabling": disable,
        "merging": root.merge_adapter,
        "unmerging": root.unmerge_adapter,
        "choosing": lambda: root.set_adapter("default"),
        "merging for good": root.merge_and_unload,
        "publishing": lambda: Publisher(root, exchange),
    }


@pytest.mark.parametrize(
    "name",
    ["nesting", "disabling", "merging", "unmerging", "choosing", "merging for good", "publishing"],
)
@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged")
def test_what_would_confuse_is_refused_inside_and_harms_nothing(directory, name):
    root = make(directory, "none")
    before = Snapshot(root)
    with merged_lora(root):
        inside = logits(root)
        with pytest.raises(UnsupportedError, match=r"inside merged_lora|has ended"):
            refused_inside(root, directory)[name]()
        assert torch.equal(logits(root), inside)
    before.require_same(root, "bytes")
    with root.disable_adapter():
        assert not torch.equal(logits(root), inside)


@on_ranks(2)
def test_a_publisher_made_before_refuses_inside_and_works_afterwards(directory, tmp_path):
    root = make(directory, "FSDP2")
    with Publisher(root, open_exchange(rank(), tmp_path / "exchange", directory / "tiny")) as publisher:
        first = publisher.publish(1).wait()
        with merged_lora(root):
            logits(root)
            with pytest.raises(UnsupportedError, match=r"merged in place; .* has ended"):
                publisher.publish(2)
        second = publisher.publish(3).wait()
    for file in first.path.rglob("*.safetensors"):
        assert file.read_bytes() == (second.path / file.relative_to(first.path)).read_bytes()


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tied head": (
        lambda d: build(Case(base="tied", lora={"target_modules": ["embed_tokens"]}), d),
        r"embed_tokens\.weight is one tensor with lm_head\.weight, .* tie_word_embeddings=False",
    ),
    "two adapters of one tied tensor": (
        lambda d: build(Case(base="tied", lora={"target_modules": ["embed_tokens", "lm_head"]}), d),
        r"lm_head\.weight is one tensor with model\.embed_tokens\.weight, but their adapters differ",
    ),
    "disabled adapters": (
        lambda d: disabled(build(CASE, d)),
        r"embed_tokens are disabled, .*enable_adapter_layers\(\)\) before you merge",
    ),
    "merged adapters": (
        lambda d: merged(build(CASE, d)),
        r"embed_tokens are merged in place; .*unmerge_adapter",
    ),
    "an aLoRA": (
        lambda d: build(
            Case(base="tiny", lora={"target_modules": ["q_proj"], "alora_invocation_tokens": [3]}), d
        ),
        "aLoRA, which cannot be merged",
    ),
}


def disabled(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"
)
def test_what_cannot_be_merged_in_place_is_refused_untouched(directory, name):
    model, words = REFUSED[name][0](directory), REFUSED[name][1]
    before, flags_before = whole_state(model), flags(model)
    with pytest.raises(UnsupportedError, match=words), merged_lora(model):
        raise AssertionError("it was accepted")
    assert differing(whole_state(model), before) == []
    assert flags(model) == flags_before


def test_what_cannot_be_taken_out_again_is_refused_by_unmerge_alone(directory):
    """A magnitude of zero: the merged row is zero, whatever the base's was."""
    model = build(CASES["dora"], directory)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "magnitude" in n)[5] = 0
    before = whole_state(model)
    with (
        pytest.raises(UnsupportedError, match=r'does not give \S+ back; use .*restore="bytes"'),
        merged_lora(model, restore="unmerge"),
    ):
        raise AssertionError("it was accepted")
    assert differing(whole_state(model), before) == []
    with merged_lora(model):
        pass
    assert differing(whole_state(model), before) == []


def test_a_way_to_restore_that_does_not_exist_is_told(directory):
    with pytest.raises(ConfigError, match="restore='copy'; expected one of bytes, unmerge"):
        merged_lora(build(CASE, directory), restore="copy").__enter__()
