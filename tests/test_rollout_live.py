"""What only a real engine shows: requests that outlive reloads, and loads that fail half-way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fresh_engine import MAX_MODEL_LEN
from live_stage import Stage
from processes import wait_until_gone
from vllm_server import MODEL, LiveServer
from worker_faults import Faults

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = "the policy says: "
OTHERS = ("12 + 34 = ", "alpha " * 30)
LONG = 950
assert len(PROMPT) + LONG < MAX_MODEL_LEN
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
GENERATING = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4},
    "/inference/v1/generate": {
        "token_ids": [50, 51, 52],
        "sampling_params": {"max_tokens": 4, "ignore_eos": True},
    },
}


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def check_every_response_names(server: LiveServer, number: int) -> None:
    for response in (
        server.http.get("/health"),
        server.http.get("/v1/models"),
        server.http.get("/nowhere"),
        server.http.post("/v1/completions", content=b"no JSON"),
    ):
        assert response.headers["x-weightferry-version"] == str(number), response


def check_metrics_beside_those_of_vllm(server: LiveServer, number: int) -> None:
    lines = server.http.get("/metrics").raise_for_status().text.splitlines()
    assert f"weightferry_active_version {number:.1f}" in lines
    assert "weightferry_applies_total 1.0" in lines
    assert 'weightferry_apply_seconds_count{phase="pause"} 1.0' in lines
    assert any(line.startswith("vllm:num_requests_running{") for line in lines)


def check_every_generating_route_heeds_what_is_asked_for(server: LiveServer, active: int) -> None:
    asked = {"version": {active: 200, active - 1: 409}, "min-version": {0: 200, active: 200, active + 1: 409}}
    for path, body in GENERATING.items():
        for is_streaming in (False, True):
            json = body | {"model": MODEL, "stream": is_streaming}
            for name, outcomes in asked.items():
                for number, status in outcomes.items():
                    headers = {f"x-weightferry-{name}": str(number)}
                    response = server.http.post(path, json=json, headers=headers)
                    assert response.status_code == status, (path, json, headers, response.text)
                    assert response.headers["x-weightferry-version"] == str(active)


def check_token_spans_name(server: LiveServer, number: int) -> None:
    route = "/inference/v1/generate"
    response = server.http.post(route, json=GENERATING[route] | {"model": MODEL}).raise_for_status()
    (choice,) = response.json()["choices"]
    assert choice["weight_versions"] == [{"version": str(number), "start": 0, "end": 4}]


def ask_long_for(server: LiveServer, version: int) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    headers = {"x-weightferry-version": str(version)}
    return server.http.post("/v1/completions", json=body, headers=headers)


def ask_long(server: LiveServer) -> httpx.Response:
    body = {"model": MODEL, "prompt": [PROMPT] * 8, "max_tokens": LONG, "temperature": 0.0}
    return server.http.post("/v1/completions", json=body | {"ignore_eos": True})


def check_that_the_engine_ends_with(server: LiveServer) -> None:
    children = server.kill()
    assert children
    wait_until_gone(children, "the engine outlives its killed API server", 30)


def test_a_request_outlives_reloads_of_merged_weights(stage):
    template = stage.directory / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = ("--enable-scale-out", "--chat-template", str(template))
    with stage.server("merged", *flags) as server, stage.training() as training:
        check_every_response_names(server, 0)
        check_token_spans_name(server, 0)
        first = training.publish()
        server.wait_for_version(first)
        check_every_response_names(server, first)
        check_metrics_beside_those_of_vllm(server, first)
        check_token_spans_name(server, first)
        check_every_generating_route_heeds_what_is_asked_for(server, first)
        with ThreadPoolExecutor(max_workers=1) as pool:
            asked_for_first = pool.submit(ask_long_for, server, first)
            with server.long_request(PROMPT, LONG) as long:
                for _ in range(3):
                    number = training.publish()
                    server.wait_for_version(number)
                assert not long.done()  # else it outlived nothing
            overtaken = asked_for_first.result()
            assert overtaken.status_code == 409  # a part of it was made by a newer one
            assert f"version {first}, then version {first + 1}" in overtaken.json()["message"]
        assert long.result().versions == {first}  # its head was sent under the first
        assert long.result().num_tokens == 8 * LONG
        before = server.ask_greedy(OTHERS)[0]
        same = training.publish(new_weights=False)
        applied = server.wait_for_version(same)["applied"][-1]
        assert (applied["tensors_applied"], applied["tensors_unchanged"]) == (0, 27)
        assert server.ask_greedy(OTHERS) == (before, {same})
        check_that_the_engine_ends_with(server)


def test_with_abort_running_requests_end_at_once_with_what_they_have(stage):
    with stage.server("merged", "--pause-mode", "abort") as server, stage.training() as training:
        with ThreadPoolExecutor(max_workers=1) as pool, server.long_request(PROMPT, LONG) as streamed:
            whole = pool.submit(ask_long, server)
            number = training.publish()
            server.wait_for_version(number)
            assert streamed.result().num_tokens < 8 * LONG
        body = whole.result().raise_for_status().json()
        assert {choice["finish_reason"] for choice in body["choices"]} == {"abort"}
        assert body["usage"]["completion_tokens"] < 8 * LONG
        assert server.ask_greedy(OTHERS)[1] == {number}


def test_with_wait_a_request_that_outlives_the_deadline_keeps_its_version_and_the_next_follows(stage):
    flags = ("--pause-mode", "wait", "--pause-deadline-s", "0.5")
    with stage.server("merged", *flags) as server, stage.training() as training:
        with server.long_request(PROMPT, LONG) as long:
            number = training.publish()
            assert "requests did not end within" in server.wait_for_refusal(number)
            assert server.ask_greedy(OTHERS)[1] == {0}  # nothing is left paused
            assert not long.done()
        assert long.result().versions == {0}
        assert long.result().num_tokens == 8 * LONG
        status = server.wait_for_version(number)
        assert status["refused"] == []
        assert server.ask_greedy(OTHERS)[1] == {number}


def test_an_adapter_serves_its_requests_to_their_end_however_many_come_after_it(stage):
    # with room for one adapter, vLLM reads each again from its directory whenever another was loaded
    with stage.server("adapter", "--max-loras", "1", "--max-cpu-loras", "1") as server:
        with server.long_request(PROMPT, LONG) as of_base, stage.training() as training:
            first = training.publish()
            server.wait_for_version(first)
            undisturbed = server.stream(PROMPT, LONG)
        assert of_base.result().versions == {0}
        assert undisturbed.versions == {first}
        check_every_response_names(server, first)
        with (
            server.long_request(PROMPT, LONG) as long,
            stage.training() as training,
            ThreadPoolExecutor(max_workers=1) as pool,
        ):
            second = training.publish()
            server.wait_for_version(second)
            queued = pool.submit(server.stream, PROMPT, 20)  # runs when the first adapter is done
            for _ in range(5):
                server.wait_for_version(training.publish())
            assert not long.done()
        assert long.result() == undisturbed
        assert queued.result().versions == {second}


@pytest.mark.slow
def test_an_adapter_of_modules_that_vllm_was_told_to_leave_out_is_refused_by_name(stage):
    with stage.server("adapter", "--lora-target-modules", "q_proj") as server:
        with stage.training(["q_proj"]) as training:
            good = training.publish()
            server.wait_for_version(good)
        answers = server.ask_greedy(OTHERS)
        assert answers[1] == {good}
        with stage.training(["q_proj", "down_proj"]) as training:
            reason = server.wait_for_refusal(training.publish())
        assert "no place for the adapter of model.layers.0.mlp.down_proj (2 in all)" in reason
        assert "--lora-target-modules" in reason
        assert server.ask_greedy(OTHERS) == answers
        with stage.training(["q_proj"]) as training:
            server.wait_for_version(training.publish())


def test_a_load_that_fails_half_way_is_undone_and_one_that_cannot_be_undone_ends_all_answers(stage):
    faults = Faults(stage.directory)
    environment = faults.environment | {"WEIGHTFERRY_MAX_TRIES": "1"}
    with stage.server("merged", environment=environment) as server:
        with stage.training() as training:
            good = training.publish()
        server.wait_for_version(good)
        answers = server.ask_greedy(OTHERS)
        faults.fail(15)
        with stage.training() as training:
            bad = training.publish()
        assert "at tensor 15 of the load" in server.wait_for_refusal(bad)
        assert server.ask_greedy(OTHERS) == answers
        with stage.training() as training:
            newer = training.publish()
        server.wait_for_version(newer)

        faults.fail(15, 1)  # and the load of what was there before fails, too
        with server.long_request(PROMPT, LONG) as long, stage.training() as training:
            training.publish()
            status = server.wait_for(lambda s: s["state"] == "unhealthy", "being unhealthy", 60)
            with pytest.raises(httpx.RemoteProtocolError):
                long.result(30)
        assert f"version {newer} could not be restored" in status["why"]
        for path in ("/health", "/v1/models"):
            assert server.http.get(path).status_code == 503
        assert "\nweightferry_healthy 0.0\n" in server.http.get("/metrics").raise_for_status().text
        assert server.http.post("/v1/completions", json={"prompt": PROMPT}).status_code == 503
