"""A server that has applied a thousand versions takes no more memory than after the first hundred.

Memory is anonymous memory (RssAnon), of the API server and of all processes below it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import descendants
from reissue import Content, Reissuer, make_contents, reissuing
from tiny_model import make_tiny_model
from vllm_server import APPLY_DEADLINE_S, LiveServer, live_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

EARLY, LATE = 100, 1000
MOST_GROWTH = 0.05
PROMPTS = ["12 + 34 = ", "alpha " * 30]
LOOK_S = 0.005


def anonymous_bytes(pid: int) -> int:
    """Of this process and all below it."""
    return sum(map(_anonymous_bytes, (pid, *descendants(pid))))


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory of its own")


def apply_until(server: LiveServer, reissuer: Reissuer, num_applies: int) -> int:
    """Publish, have it applied, ask now and then; the memory at the end."""
    while len(reissuer.numbers) < num_applies:
        number = reissuer.issue()
        deadline = time.monotonic() + APPLY_DEADLINE_S
        while server.http.get("/health").headers["x-weightferry-version"] != str(number):
            assert time.monotonic() < deadline, f"version {number} was not applied"
            time.sleep(LOOK_S)
        if number % 10 == 0:
            assert server.ask_greedy(PROMPTS)[1] == {number}
    return anonymous_bytes(server.pid)


def smallest_bytes(contents: list[Content], apply: str) -> int:
    """What one version gives the engine."""
    if apply == "merged":
        return min(sum(len(data) for shard in c.shards.values() for _, data in shard) for c in contents)
    return min(len(content.files["adapter/adapter_model.safetensors"]) for content in contents)


@pytest.mark.parametrize("apply", ["merged", "fold", "adapter"])
def test_memory_after_a_thousand_applies_is_that_after_a_hundred(tmp_path, apply):
    base = make_tiny_model(tmp_path / "base")
    contents = make_contents(tmp_path, base, 3)
    exchange = tmp_path / "exchange"
    with (
        live_server(tmp_path, base, exchange, apply) as server,
        reissuing(exchange, base, contents, keep=5, grace_s=1.0) as reissuer,
    ):
        started = time.monotonic()
        early = apply_until(server, reissuer, EARLY)
        late = apply_until(server, reissuer, LATE)
        seconds = time.monotonic() - started
        assert server.status()["refused"] == []
    growth = late - early
    print(
        f"{apply}: {early / 2**20:.0f} MiB after {EARLY} applies, {late / 2**20:.0f} MiB after {LATE} "
        f"({growth / early:+.1%}, {growth / (LATE - EARLY) / 1024:+.1f} KiB an apply); "
        f"{seconds / LATE * 1e3:.0f} ms each"
    )
    assert growth <= MOST_GROWTH * early
    # 5 % hides a leak of a tiny version each time
    assert growth < (LATE - EARLY) * smallest_bytes(contents, apply) / 4
