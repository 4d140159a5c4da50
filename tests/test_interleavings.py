"""Two writers, three readers and a pruner in random order, with crashes, against a model of a few lines.

The model knows which versions were committed and given up, and what is leased and pinned; after every step
the exchange must agree with it. Follows docs/format.md [5] and [7].
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from audit import audit
from faults import Crash, CrashAt, SilentBeat, posix_calls, silent_beats
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_exchange import make_base, publish

from weightferry.shared.errors import VersionNotFoundError, WriterFencedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.pins import pin, unpin
from weightferry.shared.retention import Pruner, RetentionPolicy
from weightferry.shared.verify import verify_version
from weightferry.shared.writer import ExchangeWriter

MAX_CALLS = 60
writer_names = st.sampled_from(["a", "b"])
reader_names = st.sampled_from(["x", "y", "z"])
crash_points = st.none() | st.tuples(st.integers(1, MAX_CALLS), st.booleans())


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        self.stack.enter_context(silent_beats())
        self.base, self.url = make_base(folder / "base"), folder / "exchange"
        Exchange.open(self.url, base=self.base)
        self.now, self.step = 1000.0, 0
        self.writers: dict[str, ExchangeWriter] = {}
        self.readers: dict[str, tuple] = {}
        self.pruner = self.new_pruner(1)
        # the model
        self.reign = ""
        self.retained: dict[int, int] = {}  # number -> step
        self.pinned: set[int] = set()

    def teardown(self) -> None:
        for lease, _ in self.readers.values():
            lease.__exit__(None, None, None)
        self.stack.close()
        SilentBeat.living.clear()

    def open(self) -> Exchange:
        return Exchange.open(self.url, base=self.base)

    def new_pruner(self, keep: int) -> Pruner:
        return Pruner(self.open(), RetentionPolicy(keep=keep), grace_s=5, clock=lambda: self.now)

    def give_up_in_model(self, keep: int) -> None:
        newest = sorted(self.retained)[-keep:]
        if len(self.retained) > keep:
            self.retained = {n: s for n, s in self.retained.items() if n in newest or n in self.pinned}

    @rule(name=writer_names, keep=st.none() | st.integers(1, 3))
    def become(self, name, keep):
        self.writers[name] = ExchangeWriter.become(
            self.open(), run_id=name, writer_ttl_s=0, keep=keep, grace_s=5
        )
        self.writers[name].pruner._clock = lambda: self.now
        self.reign = name

    @rule(name=writer_names, crash=crash_points)
    def publish(self, name, crash):
        if name not in self.writers:
            return
        writer, self.step = self.writers[name], self.step + 1
        before = [version.number for version in Exchange.open(self.url).versions()]
        try:
            if crash is None:
                version = publish(writer, self.step)
            else:
                with posix_calls(CrashAt(crash[0], after=crash[1])):
                    version = publish(writer, self.step)
            number = version.number
        except WriterFencedError:
            assert name != self.reign
            return
        except Crash:  # dead: whether it had committed, only the log knows
            del self.writers[name]
            committed = [v for v in Exchange.open(self.url).versions() if v.number not in before]
            if not committed:
                return
            number = committed[0].number
        assert name == self.reign
        assert number > max(self.retained, default=0)
        self.retained[number] = self.step
        if (keep := writer.pruner.policy.keep) is not None:
            self.give_up_in_model(keep)

    @precondition(lambda self: self.retained)
    @rule(name=reader_names, data=st.data())
    def open_version(self, name, data):
        if name in self.readers:
            return
        number = data.draw(st.integers(1, max(self.retained)))
        context = Exchange.open(self.url).open_version(number, reader=name)
        try:
            version = context.__enter__()
        except VersionNotFoundError:
            assert number not in self.retained
            return
        assert self.retained[number] == version.step
        self.readers[name] = (context, version)

    @rule(name=reader_names)
    def give_back(self, name):
        if name in self.readers:
            self.readers.pop(name)[0].__exit__(None, None, None)

    @rule(keep=st.integers(1, 3), crash=crash_points)
    def give_up(self, keep, crash):
        pruner = self.new_pruner(keep)
        if crash is None:
            pruner.give_up()
            self.give_up_in_model(keep)
            return
        try:
            with posix_calls(CrashAt(crash[0] % 8 + 1, after=crash[1])):
                pruner.give_up()
        except Crash:
            pass
        there = {version.number for version in Exchange.open(self.url).versions()}
        if there != set(self.retained):
            self.give_up_in_model(keep)

    @rule(seconds=st.sampled_from([0, 6]), crash=crash_points)
    def delete(self, seconds, crash):
        self.now += seconds
        for beat in [beat for beat in SilentBeat.living if beat.path.startswith("readers/")]:
            beat.beat()
        if crash is None:
            self.pruner.advance()
            return
        try:
            with posix_calls(CrashAt(crash[0] % 20 + 1, after=crash[1])):
                self.pruner.advance()
        except Crash:
            self.pruner = self.new_pruner(1)

    @precondition(lambda self: self.retained)
    @rule(data=st.data(), new=st.booleans())
    def pin_or_unpin(self, data, new):
        number = data.draw(st.integers(1, max(self.retained)))
        if not new:
            assert unpin(self.open(), number) == (number in self.pinned)
            self.pinned.discard(number)
        elif number in self.retained:
            assert pin(self.open(), number) == (number not in self.pinned)
            self.pinned.add(number)
        else:
            with pytest.raises(VersionNotFoundError):
                pin(self.open(), number)

    @invariant()
    def the_exchange_is_what_the_model_says(self):
        assert audit(str(self.url), self.retained) == []
        versions = Exchange.open(self.url).versions()
        assert {version.number: version.step for version in versions} == self.retained
        for _, version in self.readers.values():
            assert verify_version(version) == [], "a leased version was touched"


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Interleavings,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_random_interleavings_agree_with_the_model():
    run_machine(examples=40, steps=25)


@pytest.mark.slow
def test_many_random_interleavings_agree_with_the_model():
    run_machine(examples=600, steps=50)
