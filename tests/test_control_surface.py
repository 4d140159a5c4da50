"""Who can change what a running server does, and whom it talks to (field case 15): vLLM and plug-in as one.

The list of routes below is complete: a route that a new vLLM brings fails a test here until somebody has
decided about it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import route_lister
from network_calls import STRACE, addresses, traced
from reissue import make_contents, reissuing
from tiny_model import make_tiny_model
from vllm_server import MODEL, LiveServer, live_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOKEN = "a-long-secret"
OURS_WITH_TOKEN = {
    ("POST", f"/weightferry/{name}")
    for name in ("rollback", "pin", "unpin", "pause-updates", "resume-updates")
}
OURS_OPEN = {("GET", "/weightferry/status"), ("GET", "/weightferry/versions")}
CLOSED = {("POST", "/scale_elastic_ep")}
ANSWERS = {  # they make answers, and change nothing that another client sees
    ("POST", path)
    for path in (
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/{response_id}/cancel",  # the identifier is that response's secret
        "/v1/systemone",
        "/generative_scoring",
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/ping",
        "/is_scaling_elastic_ep",  # tells, although it is a POST
    )
}
READS = {
    (method, path)
    for path in ("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc")
    for method in ("GET", "HEAD")
} | {
    ("GET", path)
    for path in (
        "/health",
        "/kv_event_sources",
        "/load",
        "/metrics",
        "/ping",
        "/v1/models",
        "/v1/responses/{response_id}",
        "/version",
    )
}
MOUNTS = {("*", "/metrics")}
# vLLM's routes of the development mode, of its LoRA updating and of its profiler
ABSENT = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_checker",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/adapters",
    "/server_info",
    "/fault_tolerance/apply",
)
NO_VERSIONS = ("org/name", "..", "../versions", "/etc", "versions/../../x", "link")


class Surface:
    """One server that has applied a version, and the system calls of its network, if they can be traced."""

    def __init__(self, server: LiveServer, calls: Path) -> None:
        self.server, self.http, self.calls = server, server.http, calls

    def processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.server.pid)
        return [first, *first.children(recursive=True)]


@pytest.fixture(scope="module")
def surface(tmp_path_factory) -> Iterator[Surface]:
    directory = tmp_path_factory.mktemp("surface")
    base, calls = make_tiny_model(directory / "base"), directory / "calls"
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    contents = make_contents(directory, base, 1)
    with (
        live_server(
            directory,
            base,
            directory / "exchange",
            "adapter",
            *("--middleware", route_lister.MIDDLEWARE, "--token-file", str(token_file)),
            environment={
                "PYTHONPATH": os.pathsep.join([str(Path(route_lister.__file__).parent), *sys.path]),
                "HF_HUB_OFFLINE": "0",  # the server sets it itself
            },
            under=traced(calls, is_detached=True),
        ) as server,
        reissuing(directory / "exchange", base, contents, keep=1, grace_s=1.0) as reissuer,
    ):
        server.wait_for_version(reissuer.issue())
        yield Surface(server, calls)


def routes(surface: Surface) -> set[tuple[str, str]]:
    return {(method, path) for method, path in surface.http.get(route_lister.PATH).json()}


def test_every_route_of_the_running_server_is_one_that_was_decided_about(surface):
    found = {route for route in routes(surface) if route[0] != "HEAD" or route in READS}
    known = OURS_WITH_TOKEN | OURS_OPEN | CLOSED | ANSWERS | READS | MOUNTS
    assert known - found == set()
    assert {route for route in found - known if not is_closed_by_vllm(surface, *route)} == set()


def is_closed_by_vllm(surface: Surface, method: str, path: str) -> bool:
    """Routes of vLLM's scale-out are there without its flag, and refuse."""
    response = surface.http.request(method, path, json={})
    return response.status_code == 403 and "--enable-scale-out" in response.text


@pytest.mark.parametrize("path", sorted(path for _, path in OURS_WITH_TOKEN))
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}"])
def test_each_of_our_routes_that_changes_something_refuses_without_the_token(surface, path, given):
    before = surface.server.status()
    headers = {} if given is None else {"authorization": given}
    response = surface.http.post(path, json={"number": 1}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert surface.server.status() == before


@pytest.mark.parametrize("path", ABSENT)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_routes_of_vllm_that_change_weights_or_caches_are_not_there(surface, method, path):
    assert surface.http.request(method, path, json={} if method == "POST" else None).status_code in (404, 405)
    assert {
        found for found in routes(surface) if found[1].startswith(f"{path}/") or found[1] == path
    } == set()


def test_a_route_that_vllm_mounts_in_every_server_is_closed(surface):
    response = surface.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert response.status_code == 403
    assert "this route is closed" in response.json()["message"]


@pytest.mark.parametrize("name", NO_VERSIONS)
def test_with_the_token_a_path_or_a_name_is_no_version(surface, name):
    before = surface.server.status()
    headers = {"authorization": f"Bearer {TOKEN}"}
    for body in ({"number": name}, {"path": name}, {"model": name}, name):
        response = surface.http.post("/weightferry/rollback", json=body, headers=headers)
        assert response.status_code == 400
    assert surface.server.status() == before


@pytest.mark.parametrize("name", NO_VERSIONS)
def test_a_client_cannot_name_a_model_that_is_not_served(surface, name):
    body = {"model": name, "prompt": "a", "max_tokens": 1}
    assert surface.http.post("/v1/completions", json=body).status_code == 404


def test_a_client_cannot_make_the_server_fetch_an_address(surface):
    image = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/x.png"}}
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    assert surface.http.post("/v1/chat/completions", json=body).status_code == 400


def test_nothing_listens_beyond_loopback(surface):
    sockets = [found for process in surface.processes() for found in process.net_connections("inet")]
    listening = [found.laddr for found in sockets if found.status == psutil.CONN_LISTEN or not found.raddr]
    assert surface.http.base_url.port in [address.port for address in listening]
    assert [address for address in listening if address.ip not in ("127.0.0.1", "::1")] == []


@pytest.mark.skipif(STRACE is None, reason="runs on Linux with strace installed")
def test_no_connection_beyond_loopback_was_attempted_since_the_start(surface):
    surface.server.ask_greedy(["12 + 34 = "])
    assert "127.0.0.1" in addresses(surface.calls, "bind")  # it does trace
    assert addresses(surface.calls, "bind") | addresses(surface.calls, "connect") <= {"127.0.0.1", "::1"}
