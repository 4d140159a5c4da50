"""Both jobs as real processes, killed where it hurts: each comes back, and the next version is served.

One story, because a vLLM start costs half a minute: the server is there first; the trainer dies in the middle
of its first publication; the server dies in the middle of its first apply; both come back; at last a server
that is started after everything else catches up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_model import make_tiny_model

from weightferry.examples.demo_client import PolicyClient, Reply
from weightferry.examples.demo_jobs import Job, ServerPlan, TrainerPlan, free_port
from weightferry.shared.exchange import Exchange
from weightferry.shared.kill_points import VARIABLE
from weightferry.shared.verify import verify_exchange

pytestmark = [pytest.mark.vllm, pytest.mark.ranks]

START_DEADLINE_S = 240.0
SERVE_DEADLINE_S = 90.0
TRAIN_DEADLINE_S = 240.0
PROMPTS = ("12+34=", "the quick brown fox " * 10)  # the second is longer than one KV block (128 tokens)


class Stage:
    """The two jobs' settings and where they meet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = make_tiny_model(directory / "base")
        self.exchange_path = directory / "exchange"
        self._rows = directory / "rows.jsonl"
        rows = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(32)]
        self._rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def server(self, name: str) -> ServerPlan:
        return ServerPlan(
            base=self.base,
            exchange=self.exchange_path,
            apply="merged",
            port=free_port(),
            log=self.directory / f"{name}.log",
            cache=self.directory / "cache",  # the same for all: a killed server's is its successor's
            max_model_len=512,
            kv_cache_bytes=32 << 20,
            max_lora_rank=8,
        )

    def trainer(self, name: str) -> TrainerPlan:
        settings = self.directory / f"{name}.toml"
        settings.write_text(
            f"""\
base = {json.dumps(str(self.base))}
exchange = {json.dumps(str(self.exchange_path))}
output_dir = {json.dumps(str(self.directory / name))}
seed = {len(list(self.directory.glob("*.toml")))}

[data]
path = {json.dumps(str(self._rows))}
max_length = 32
batch_size = 4

[lora]
r = 8
lora_alpha = 16
target_modules = "all-linear"

[optimizer]
lr = 0.05

[schedule]
num_steps = 2

[publish]
every = 2
what = "both"
"""
        )
        return TrainerPlan(settings=settings, log=self.directory / f"{name}.log", num_ranks=2)

    def train(self, name: str) -> int:
        """Run a trainer to its end; returns the number of the version it published last."""
        with self.trainer(name).start() as job:
            wait_for_end(job)
            job.require_running_or_done()
        latest = Exchange.open(self.exchange_path).latest()
        assert latest is not None
        return latest.number


def start(plan: ServerPlan | TrainerPlan, kill_at: str) -> Job:
    return Job("job", plan.command(), log=plan.log, environment=plan.environment() | {VARIABLE: kill_at})


def wait_for_end(job: Job) -> None:
    wait(lambda: job.exit_code() is not None, f"the end of {job.log}", TRAIN_DEADLINE_S)


def wait(is_so: Callable[[], bool], what: str, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come within {deadline_s:.0f} s"
        time.sleep(0.1)


def wait_until_serves(job: Job, client: PolicyClient, number: int) -> None:
    def serves() -> bool:
        status = client.status()
        return status is not None and (status["state"], status["active_version"]) == ("serving", number)

    job.wait_until(serves, what=f"it served version {number}", deadline_s=START_DEADLINE_S)


def ask(client: PolicyClient) -> Reply:
    (reply,) = client.complete_all([PROMPTS], max_tokens=12)
    return reply


@pytest.mark.timeout(900)
def test_whichever_job_is_killed_both_come_back_and_the_next_version_is_served(tmp_path):
    stage = Stage(tmp_path)
    first = stage.server("server-1")
    with start(first, kill_at="during-apply") as server, PolicyClient(first.url, str(stage.base)) as client:
        wait_until_serves(server, client, 0)  # the server is first: there is no exchange yet
        of_base = ask(client)
        assert of_base.versions == {0}

        with start(stage.trainer("trainer-1"), kill_at="after-shard:1") as trainer:
            wait_for_end(
                trainer
            )  # its ranks end themselves with SIGKILL in the middle of the first publication
            assert trainer.exit_code() != 0
        assert Exchange.open(stage.exchange_path).latest() is None
        assert ask(client) == of_base

        published = stage.train("trainer-2")
        # the engine's process ended itself with SIGKILL after one tensor; its API server then ends by itself
        wait(lambda: server.exit_code() is not None, "the end of the killed server", SERVE_DEADLINE_S)
        assert "EngineDeadError" in first.log.read_text()

    second = stage.server("server-2")
    with second.start() as server, PolicyClient(second.url, str(stage.base)) as client:
        wait_until_serves(server, client, published)
        of_published = ask(client)
        assert of_published.versions == {published}
        assert of_published.texts != of_base.texts

        newest = stage.train("trainer-3")
        wait_until_serves(server, client, newest)
        of_newest = ask(client)
        assert of_newest.versions == {newest}

    third = stage.server("server-3")  # the trainer was first: this server catches up at its start
    with third.start() as server, PolicyClient(third.url, str(stage.base)) as client:
        wait_until_serves(server, client, newest)
        assert ask(client) == of_newest

    exchange = Exchange.open(stage.exchange_path)
    assert verify_exchange(exchange) == []
    assert len(exchange.versions()) == 2
    named = {version.path.name for version in exchange.versions()}
    assert {path.name for path in (stage.exchange_path / "versions").iterdir()} == named
    with safe_open(exchange.versions()[-1].path / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        assert any(adapter.get_tensor(name).any() for name in adapter.keys() if "lora_B" in name)  # noqa: SIM118
