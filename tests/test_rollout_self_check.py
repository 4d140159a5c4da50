"""A server of merged weights starts only on an engine that loads the base again as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_exchange import make_base

from weightferry.rollout_server.engine import Part
from weightferry.rollout_server.self_check import require_faithful_reload
from weightferry.shared.base import identify_base
from weightferry.shared.checkpoint import Checkpoint
from weightferry.shared.digest import sha256_hex
from weightferry.shared.errors import ApplyError, UnsupportedError


class Engine:
    """Holds the weights of a checkpoint; `lay_out` is what a reload makes of a tensor's bytes."""

    def __init__(self, path: Path) -> None:
        found = Checkpoint.open(path)
        self.weights = {name: found.read_bytes(name) for name in found.slots}
        self.num_lost, self.asked, self.left_out = 0, set[str](), set[str]()
        self.lay_out: Callable[[str, bytes], bytes] = lambda name, data: data

    async def weight_checksums(self) -> dict[str, str]:
        return {f"tp0:{name}": sha256_hex(data) for name, data in self.weights.items()}

    async def reload_from_zero(self, parts: tuple[Part, ...]) -> int:
        self.weights = {name: bytes(len(data)) for name, data in self.weights.items()}
        for part in parts:
            found = Checkpoint.open(Path(part.file).parent)
            for name in part.tensors:
                self.asked.add(name)
                if name not in self.left_out:
                    self.weights[name] = self.lay_out(name, found.read_bytes(name))
        return len(self.asked) - self.num_lost


def check(engine: Engine, path: Path) -> None:
    found = Checkpoint.open(path)
    asyncio.run(require_faithful_reload(engine, found, identify_base(found)[1]))


def test_an_engine_that_loads_the_base_again_as_it_was_is_served(tmp_path):
    base = make_base(tmp_path / "base")
    engine = Engine(base)
    check(engine, base)
    assert engine.asked == Checkpoint.open(base).specs.keys()  # none is left out


def test_one_that_lays_out_a_single_weight_otherwise_is_refused_by_its_name(tmp_path):
    base = make_base(tmp_path / "base")
    engine = Engine(base)
    last = sorted(engine.weights)[-1]
    engine.lay_out = lambda name, data: data[::-1] if name == last else data
    with pytest.raises(UnsupportedError, match=f"changed: tp0:{last}\\).*--apply adapter"):
        check(engine, base)


def test_one_that_takes_a_tensor_and_leaves_its_weight_alone_is_refused(tmp_path):
    base = make_base(tmp_path / "base")
    engine = Engine(base)
    engine.left_out.add(sorted(engine.weights)[0])
    with pytest.raises(UnsupportedError, match=f"changed: tp0:{sorted(engine.weights)[0]}\\)"):
        check(engine, base)


def test_one_that_was_started_on_another_checkpoint_is_refused(tmp_path):
    base = make_base(tmp_path / "base")
    engine = Engine(base)
    for name, data in engine.weights.items():
        engine.weights[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(UnsupportedError, match=r"and \d+ more\).*started on another checkpoint"):
        check(engine, base)


def test_one_that_loses_a_weight_or_skips_a_tensor_or_cannot_load_is_refused(tmp_path):
    base = make_base(tmp_path / "base")
    engine = Engine(base)
    engine.num_lost = 1
    with pytest.raises(UnsupportedError, match="changed: none"):
        check(engine, base)

    class Losing(Engine):
        async def reload_from_zero(self, parts: tuple[Part, ...]) -> int:
            num_loaded = await super().reload_from_zero(parts)
            self.weights.popitem()
            return num_loaded

    with pytest.raises(UnsupportedError, match="changed: tp0:"):
        check(Losing(base), base)

    class Failing(Engine):
        async def reload_from_zero(self, parts: tuple[Part, ...]) -> int:
            raise ApplyError("reload failed on rank 1: gone")

    with pytest.raises(
        UnsupportedError, match=r"cannot load the base .* again: reload failed on rank 1.*--apply adapter"
    ):
        check(Failing(base), base)
