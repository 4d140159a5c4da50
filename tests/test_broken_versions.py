"""The matrix of broken versions on a real server: each leaves the old version answering, and is named in the
status, or leaves no answer at all; never a mixture. Printed as a table at the end.

"The old version answers" means: greedy answers are those of a fresh vLLM started on that version, and their
header names it. One server at a time: for each mode one, and a new one for what no server survives.
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
from broken_versions import CASES, CONFIG, Broken
from broken_world import PROMPTS, Material, Row, World, serving
from reissue import make_contents
from tiny_model import make_tiny_model
from vllm_server import APPLY_DEADLINE_S, MODEL, LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_APPLIED = 20  # tensors of an apply: all linear layers, with the biases that vLLM fuses them with
FAILING = (1, NUM_APPLIED // 2 + 1, NUM_APPLIED)


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
    """Two contents of one base."""
    directory = tmp_path_factory.mktemp("broken")
    base = make_tiny_model(directory / "base")
    return Material(directory=directory, base=base, contents=make_contents(directory, base, 2))


@pytest.fixture(scope="module")
def world(mode, material, table) -> Iterator[World]:
    """The server of one mode; pytest runs all tests of the mode in a row, and then ends it."""
    with serving(material, table, mode, mode.replace(" ", "-")) as world:
        yield world


def in_modes(*modes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mode", modes, scope="module")


def check_that_it_is_refused_and_the_old_one_answers(world: World, case: str) -> None:
    broken = CASES[world.mode][case]
    number, _ = world.publish(broken, content=1)
    world.control("resume-updates")
    world.check_refused(case, number, broken.words)


@in_modes("merged")
@pytest.mark.parametrize("case", CASES["merged"])
def test_a_broken_merged_version_is_refused_and_the_old_one_answers(world, case):
    check_that_it_is_refused_and_the_old_one_answers(world, case)


@in_modes("adapter")
@pytest.mark.parametrize("case", CASES["adapter"])
def test_a_broken_adapter_is_refused_and_the_old_one_answers(world, case):
    check_that_it_is_refused_and_the_old_one_answers(world, case)


@in_modes("fold")
@pytest.mark.parametrize("case", CASES["fold"])
def test_a_broken_adapter_to_fold_is_refused_and_the_old_one_answers(world, case):
    check_that_it_is_refused_and_the_old_one_answers(world, case)


@in_modes("2 ranks")
@pytest.mark.parametrize("case", CASES["2 ranks"])
def test_a_broken_version_of_two_ranks_is_refused_and_the_old_one_answers(world, case):
    check_that_it_is_refused_and_the_old_one_answers(world, case)


@in_modes("merged", "adapter", "fold")
def test_a_version_of_another_base_is_refused_and_the_old_one_answers(world):
    exchange = world.reissuer.writer.exchange
    own = exchange.base
    exchange.base = replace(own, tensors_digest="0" * len(own.tensors_digest))
    try:
        number = world.publish_now(world.reissuer.contents[1])
    finally:
        exchange.base = own
    world.check_refused("other base", number, "another base")


@in_modes(*CASES)
def test_a_good_version_after_a_poisoned_one_is_served(world):
    nan = CASES[world.mode]["NaN"]
    poison, _ = world.publish(nan, content=1)
    world.control("resume-updates")
    reason = world.server.wait_for_refusal(poison)
    assert nan.words in reason
    good = world.serve(1)
    assert good > poison
    world.say("poison, then good", "refused it, served the next", reason, "good version, exactly")
    world.serve(0)


@in_modes("merged", "adapter", "fold")
def test_a_version_deleted_while_it_is_fetched_is_refused(world):
    number, directory = world.publish(Broken(words=""), content=1)
    first = directory / ("layer-00000.safetensors" if world.mode == "merged" else CONFIG)
    world.faults.hold_open(first)
    world.control("resume-updates")
    world.faults.wait_until_held()
    shutil.rmtree(directory)
    world.faults.release()
    world.check_refused("deleted during staging", number, "is missing")


@in_modes("merged", "adapter", "fold")
def test_the_version_that_answers_may_be_deleted_from_the_exchange(world):
    number = world.serve(1)
    shutil.rmtree(world.reissuer.writer.exchange.version(number).path)
    world.check_old_version_answers()
    world.say("deleted while it answers", "needs it no more", "", "the same version, exactly")
    world.serve(0)


@in_modes("merged", "fold")
@pytest.mark.parametrize("tensor", FAILING)
def test_a_load_that_fails_at_any_tensor_is_undone(world, tensor):
    number, _ = world.publish(Broken(words=""), content=1)
    world.faults.fail(tensor)
    world.control("resume-updates")
    world.check_refused(
        f"load fails at tensor {tensor} of {NUM_APPLIED}", number, f"at tensor {tensor} of the load"
    )


@in_modes("2 ranks")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_at_any_tensor_is_undone_on_all(world, rank):
    for tensor in FAILING:
        number, _ = world.publish(Broken(words=""), content=1)
        world.faults.fail(tensor, rank=rank)
        world.control("resume-updates")
        case = f"load fails on rank {rank} at tensor {tensor} of {NUM_APPLIED}"
        words = f"rank {rank}: OSError: a fault of the test's at tensor {tensor} of the load"
        world.check_refused(case, number, words)


def delete_from_exchange(_world: World, directory: Path, _staged: Path) -> None:
    shutil.rmtree(directory)


def delete_everywhere(_world: World, directory: Path, staged: Path) -> None:
    shutil.rmtree(directory)
    shutil.rmtree(staged)


def publish_held(world: World, then: Callable[[World, Path, Path], None], *, rank: int = 0) -> int:
    """A version whose load is held in its first file while `then` does something."""
    number, directory = world.publish(Broken(words=""), content=1)
    world.faults.hold(3, rank=rank)
    world.control("resume-updates")
    world.faults.wait_until_held()
    (staged,) = world.cache.glob(f"version-*{number}")
    then(world, directory, staged)
    return number


@in_modes("merged", "fold")
def test_a_version_deleted_from_the_exchange_while_it_is_loaded_is_served_whole(world):
    number = publish_held(world, delete_from_exchange)
    world.faults.release()
    world.server.wait_for_version(number)
    world.old, world.old_content = number, 1
    world.check_old_version_answers()
    world.say("deleted during apply", "had it on its own disk", "", "new version, exactly")
    world.serve(0)


@in_modes("merged", "fold")
def test_a_version_deleted_from_the_host_too_while_it_is_loaded_is_undone(world):
    number = publish_held(world, delete_everywhere)
    world.faults.release()
    world.check_refused("deleted during apply, cache too", number, "is missing")


@in_modes("merged")
def test_a_load_that_can_be_neither_finished_nor_undone_ends_all_answers(world):
    world.publish(Broken(words=""), content=1)
    world.faults.fail(6, 1)
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


@in_modes("2 ranks", "merged again")
def test_a_killed_worker_ends_all_answers(world):
    rank = 1 if world.mode == "2 ranks" else 0
    with ThreadPoolExecutor(max_workers=1) as pool:
        publish_held(world, lambda *_: None, rank=rank)
        waits = pool.submit(world.server.ask_greedy, PROMPTS)
        os.kill(world.faults.wait_until_held(), signal.SIGKILL)
        assert isinstance(waits.exception(APPLY_DEADLINE_S), httpx.HTTPError)
        deadline = time.monotonic() + APPLY_DEADLINE_S
        while (status := completion_or_refusal(world.server)) is not None:
            assert status in (500, 503)
            assert time.monotonic() < deadline, "the server outlives its worker"
            time.sleep(0.05)
    assert "EngineDeadError" in world.server.log
    world.say(f"worker of rank {rank} killed during apply", "ended", "", "none (no connection)")
