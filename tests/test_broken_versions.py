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
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from broken_versions import CASES, CONFIG, Broken, SlowFile
from broken_world import PROMPTS, Material, Row, World, serving
from fresh_engine import ask_fresh_engines
from reissue import make_contents
from tiny_model import make_tiny_model
from vllm_server import APPLY_DEADLINE_S, MODEL, LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_APPLIED = 20  # tensors of an apply: all linear layers, with the biases that vLLM fuses them with


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
    references = {"merged": answers[:2], "fold": answers[:2], "adapter": answers[2:]}
    return Material(directory=directory, base=base, contents=contents, references=references)


@pytest.fixture(scope="module")
def merged(material, table) -> Iterator[World]:
    with serving(material, table, "merged", "merged") as world:
        yield world


@pytest.fixture(scope="module")
def adapter(material, table) -> Iterator[World]:
    with serving(material, table, "adapter", "adapter") as world:
        yield world


@pytest.fixture(scope="module")
def fold(material, table) -> Iterator[World]:
    with serving(material, table, "fold", "fold") as world:
        yield world


@pytest.fixture
def world(request, mode) -> World:
    return request.getfixturevalue(mode)


@pytest.mark.parametrize(("mode", "case"), [(mode, case) for mode in CASES for case in CASES[mode]])
def test_a_broken_version_is_refused_and_the_old_one_answers(world, mode, case):
    broken = CASES[mode][case]
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
    nan = CASES[mode]["NaN"]
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
