"""A bucket as the exchange between the demo's real trainer (two ranks) and a real vLLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from s3_servers import fresh_url, s3_server
from test_whole_path import Stage, ask, start, wait_until_serves

from weightferry.examples.demo_client import PolicyClient
from weightferry.shared.exchange import Exchange
from weightferry.shared.materialize import materialize
from weightferry.shared.verify import verify_exchange

pytestmark = [pytest.mark.vllm, pytest.mark.ranks, pytest.mark.slow]


class BucketStage(Stage):
    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(directory)
        self.exchange_path: Any = url


@pytest.mark.timeout(900)
def test_a_version_travels_through_a_bucket_into_a_live_server(tmp_path):
    (tmp_path / "server").mkdir()
    with s3_server("seaweedfs", tmp_path / "server"):
        stage = BucketStage(tmp_path, fresh_url())
        plan = stage.server("server")
        with start(plan, kill_at="") as server, PolicyClient(plan.url, str(stage.base)) as client:
            wait_until_serves(server, client, 0)
            of_base = ask(client)
            for name in ("trainer-1", "trainer-2"):
                number = stage.train(name)
                wait_until_serves(server, client, number)
                answer = ask(client)
                assert answer.versions == {number}
                assert answer.texts != of_base.texts
        exchange = Exchange.open(stage.exchange_path)
        assert verify_exchange(exchange) == []
        assert len(exchange.versions()) == 2
        latest = exchange.latest()
        assert latest is not None
        materialize(latest, tmp_path / "copy")
        assert (tmp_path / "copy" / "config.json").exists()
