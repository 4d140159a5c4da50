"""The matrix of broken versions on a real server: each leaves the old version answering, and is named in the
status, or leaves no answer at all; never a mixture. Printed as a table at the end.

"The old version answers" means: greedy answers are those of a fresh vLLM started on that version, and their
header names it. One server for all that a server survives, a new one for what it does not.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from broken_versions import ADAPTER, CONFIG, MERGED, Broken, SlowFile
from fresh_engine import ask_fresh_engines
from reissue import Content, Reissuer, make_contents, reissuing
from tiny_model import make_tiny_model
from vllm_server import APPLY_DEADLINE_S, MODEL, Answers, LiveServer, live_server
from worker_faults import Faults

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["12 + 34 = ", "the policy says: ", "alpha " * 30]
TOKEN = "a-token-of-this-test"
NUM_APPLIED = 20  # tensors of an apply: all linear layers, with the biases that vLLM fuses them with
OLD = "old version, exactly"
Row = tuple[str, ...]


@pytest.fixture(scope="module")
def table(request) -> Iterator[list[Row]]:
    rows: list[Row] = [("case", "mode", "the server", "refusal", "answers afterwards")]
    yield rows
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for row in rows:
            print(
                " | ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]])
            )


@dataclass(slots=True, kw_only=True)
class World:
    """A server that answers with the old version, and a writer that publishes what comes next."""

    mode: str
    server: LiveServer
    reissuer: Reissuer
    faults: Faults
    references: list[Answers]
    rows: list[Row]
    old: int = 0
    old_content: int = 0

    @property
    def cache(self) -> Path:
        """Where the server stages."""
        return self.reissuer.writer.exchange.path.parent / "server-cache"

    def publish(self, broken: Broken, content: int) -> tuple[int, Path]:
        """Publish it while the server looks away, so that the harm is done when it looks; its directory."""
        self.control("pause-updates")
        number = self.publish_now(broken.write(self.reissuer.contents[content]))
        directory = self.reissuer.writer.exchange.version(number).path
        broken.harm(directory)
        return number, directory

    def publish_now(self, content: Content) -> int:
        saved = list(self.reissuer.contents)
        self.reissuer.contents[:] = [content]
        try:
            return self.reissuer.issue()
        finally:
            self.reissuer.contents[:] = saved

    def serve(self, content: int) -> int:
        """Publish a good version; it is the old one from now on."""
        number = self.publish_now(self.reissuer.contents[content])
        self.server.wait_for_version(number)
        self.old, self.old_content = number, content
        self.check_old_version_answers()
        return number

    def control(self, name: str) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        self.server.http.post(f"/weightferry/{name}", headers=headers).raise_for_status()

    def check_old_version_answers(self) -> None:
        assert self.server.ask_greedy(PROMPTS) == (self.references[self.old_content], {self.old})

    def check_refused(self, case: str, number: int, words: str) -> None:
        """It is refused with these words, and the old version answers; a line of the table."""
        reason = self.server.wait_for_refusal(number)
        assert words in reason
        assert self.server.status()["active_version"] == self.old
        self.check_old_version_answers()
        self.say(case, "refused it", reason, OLD)

    def say(self, case: str, did: str, words: str, answers: str) -> None:
        self.rows.append((case, self.mode, did, shortened(words), answers))


def shortened(words: str) -> str:
    """Without the directories, which are the test's own."""
    parts = [word.rpartition("/")[2] if word.startswith("/") else word for word in words.split()]
    return " ".join(parts)[:90]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    directory: Path
    base: Path
    contents: list[Content]
    references: dict[str, list[Answers]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    """Two contents, and what a fresh vLLM answers with each, merged and as an adapter."""
    directory = tmp_path_factory.mktemp("broken")
    base = make_tiny_model(directory / "base")
    contents = make_contents(directory, base, 2)
    merged: list[tuple[Path, Path | None]] = [(content.directory, None) for content in contents]
    adapters: list[tuple[Path, Path | None]] = [(base, content.directory / "adapter") for content in contents]
    answers = ask_fresh_engines(PROMPTS, [*merged, *adapters])
    assert answers[0] != answers[1]
    assert answers[2] != answers[3]
    references = {"merged": answers[:2], "adapter": answers[2:]}
    return Material(directory=directory, base=base, contents=contents, references=references)


@contextmanager
def serving(material: Material, rows: list[Row], mode: str, name: str) -> Iterator[World]:
    """A world whose server answers with the first content; nothing is tried twice: one try decides."""
    directory = material.directory / name
    directory.mkdir()
    exchange, faults = directory / "exchange", Faults(directory)
    environment = faults.environment | {"WEIGHTFERRY_MAX_TRIES": "1", "WEIGHTFERRY_TOKEN": TOKEN}
    with (
        live_server(directory, material.base, exchange, mode, environment=environment) as server,
        reissuing(exchange, material.base, list(material.contents), keep=100, grace_s=60.0) as reissuer,
    ):
        world = World(
            mode=mode,
            server=server,
            reissuer=reissuer,
            faults=faults,
            references=material.references[mode],
            rows=rows,
        )
        world.serve(0)
        yield world


@pytest.fixture(scope="module")
def merged(material, table) -> Iterator[World]:
    with serving(material, table, "merged", "merged") as world:
        yield world


@pytest.fixture(scope="module")
def adapter(material, table) -> Iterator[World]:
    with serving(material, table, "adapter", "adapter") as world:
        yield world


@pytest.fixture
def world(request, mode) -> World:
    return request.getfixturevalue(mode)


CASES = [("merged", case) for case in MERGED] + [("adapter", case) for case in ADAPTER]


@pytest.mark.parametrize(("mode", "case"), CASES)
def test_a_broken_version_is_refused_and_the_old_one_answers(world, mode, case):
    broken = (MERGED if mode == "merged" else ADAPTER)[case]
    number, _ = world.publish(broken, content=1)
    world.control("resume-updates")
    world.check_refused(case, number, broken.words)


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_a_version_of_another_base_is_refused_and_the_old_one_answers(world, mode):
    exchange = world.reissuer.writer.exchange
    own = exchange.base
    exchange.base = replace(own, tensors_digest="0" * len(own.tensors_digest))
    try:
        number = world.publish_now(world.reissuer.contents[1])
    finally:
        exchange.base = own
    world.check_refused("other base", number, "another base")


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_a_good_version_after_a_poisoned_one_is_served(world, mode):
    nan = (MERGED if mode == "merged" else ADAPTER)["NaN"]
    poison, _ = world.publish(nan, content=1)
    world.control("resume-updates")
    reason = world.server.wait_for_refusal(poison)
    assert nan.words in reason
    good = world.serve(1)
    assert good > poison
    world.say("poison, then good", "refused it, served the next", reason, "good version, exactly")
    world.serve(0)


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_a_version_deleted_while_it_is_fetched_is_refused(world, mode):
    number, directory = world.publish(Broken(words=""), content=1)
    first = directory / ("layer-00000.safetensors" if mode == "merged" else CONFIG)
    slow = SlowFile(first)
    world.control("resume-updates")
    slow.delete_directory_when_read()
    world.check_refused("deleted during staging", number, "is missing")


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_the_version_that_answers_may_be_deleted_from_the_exchange(world, mode):
    number = world.serve(1)
    shutil.rmtree(world.reissuer.writer.exchange.version(number).path)
    world.check_old_version_answers()
    world.say("deleted while it answers", "needs it no more", "", "the same version, exactly")
    world.serve(0)


@pytest.mark.parametrize("mode", ["merged"])
@pytest.mark.parametrize("tensor", [0, NUM_APPLIED // 2, NUM_APPLIED - 1])
def test_a_load_that_fails_after_any_tensor_is_undone(world, mode, tensor):
    number, _ = world.publish(Broken(words=""), content=1)
    world.faults.fail(tensor)
    world.control("resume-updates")
    world.check_refused(
        f"load fails at tensor {tensor + 1} of {NUM_APPLIED}", number, f"after tensor {tensor}"
    )


def delete_from_exchange(_world: World, directory: Path, _staged: Path) -> None:
    shutil.rmtree(directory)


def delete_everywhere(_world: World, directory: Path, staged: Path) -> None:
    shutil.rmtree(directory)
    shutil.rmtree(staged)


def publish_held(world: World, then: Callable[[World, Path, Path], None]) -> int:
    """A version whose load is held in its first file while `then` does something."""
    number, directory = world.publish(Broken(words=""), content=1)
    world.faults.hold(2)
    world.control("resume-updates")
    world.faults.wait_until_held()
    (staged,) = world.cache.glob(f"version-*{number}")
    then(world, directory, staged)
    return number


@pytest.mark.parametrize("mode", ["merged"])
def test_a_version_deleted_from_the_exchange_while_it_is_loaded_is_served_whole(world, mode):
    number = publish_held(world, delete_from_exchange)
    world.faults.release()
    world.server.wait_for_version(number)
    world.old, world.old_content = number, 1
    world.check_old_version_answers()
    world.say("deleted during apply", "had it on its own disk", "", "new version, exactly")
    world.serve(0)


@pytest.mark.parametrize("mode", ["merged"])
def test_a_version_deleted_from_the_host_too_while_it_is_loaded_is_undone(world, mode):
    number = publish_held(world, delete_everywhere)
    world.faults.release()
    world.check_refused("deleted during apply, cache too", number, "is missing")


@pytest.mark.parametrize("mode", ["merged"])
def test_a_load_that_can_be_neither_finished_nor_undone_ends_all_answers(world, mode):
    world.publish(Broken(words=""), content=1)
    world.faults.fail(5, 0)
    world.control("resume-updates")
    status = world.server.wait_for(lambda s: s["state"] == "unhealthy", "being unhealthy", APPLY_DEADLINE_S)
    assert f"version {world.old} could not be restored" in status["why"]
    for path in ("/health", "/v1/models"):
        assert world.server.http.get(path).status_code == 503
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        world.server.ask_greedy(PROMPTS)
    world.say("load and restore fail", "unhealthy", status["why"], "none (503)")


def completion_or_refusal(server: LiveServer) -> int | None:
    """The status of an answer; None when nobody listens any more."""
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 1}
    try:
        return server.http.post("/v1/completions", json=body).status_code
    except httpx.ConnectError:
        return None
    except httpx.TransportError:  # cut off
        return 503


def test_a_killed_worker_ends_all_answers(material, table):
    with (
        serving(material, table, "merged", "killed") as world,
        ThreadPoolExecutor(max_workers=1) as pool,
    ):
        publish_held(world, lambda *_: None)
        waits = pool.submit(world.server.ask_greedy, PROMPTS)
        os.kill(world.faults.wait_until_held(), signal.SIGKILL)
        assert isinstance(waits.exception(APPLY_DEADLINE_S), httpx.HTTPError)
        deadline = time.monotonic() + APPLY_DEADLINE_S
        while (status := completion_or_refusal(world.server)) is not None:
            assert status in (500, 503)
            assert time.monotonic() < deadline, "the server outlives its worker"
            time.sleep(0.05)
    assert "EngineDeadError" in world.server.log
    world.say("worker killed during apply", "ended", "", "none (no connection)")
