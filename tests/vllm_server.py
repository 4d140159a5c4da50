"""A real `weightferry serve` on a tiny base, and greedy questions to it, for tests that need the engine.

One server at a time: a start costs half a minute of both cores.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fresh_engine import KV_CACHE_BYTES, MAX_MODEL_LEN, MAX_TOKENS

from weightferry.examples.demo_client import named_versions
from weightferry.examples.demo_jobs import Job, ServerPlan, free_port

START_DEADLINE_S = 240.0
APPLY_DEADLINE_S = 60.0
MODEL = "policy"  # the one public name

Answers = list[list[int]]
Status = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A whole streamed response to eight equal questions: the first one's text, the tokens of all, and the
    versions that its head named."""

    text: str
    num_tokens: int
    versions: frozenset[int]


class LiveServer:
    """A server that runs; made by `live_server`."""

    def __init__(self, job: Job, http: httpx.Client) -> None:
        self._job, self.http = job, http

    @property
    def log(self) -> str:
        return self._job.log.read_text()

    @property
    def pid(self) -> int:
        """The API server's."""
        return self._job._process.pid

    def kill(self) -> list[int]:
        """SIGKILL to the API server, and only to it; returns the processes that it had started."""
        pid = self.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        self._job._process.kill()
        return children

    def end(self, by: signal.Signals) -> int:
        """Send the API server a signal; the exit code that it ends with."""
        self._job._process.send_signal(by)
        return self._job._process.wait(APPLY_DEADLINE_S)

    def status(self) -> Status:
        return self.http.get("/weightferry/status").raise_for_status().json()

    def wait_for(self, is_so: Callable[[dict[str, Any]], bool], what: str, deadline_s: float) -> Status:
        """The first status of which this is so."""
        seen: list[Status] = []

        def look() -> bool:
            try:
                seen[:] = [self.status()]
            except httpx.TransportError:
                return False
            return is_so(seen[0])

        self._job.wait_until(look, what=what, deadline_s=deadline_s)
        return seen[0]

    def wait_for_version(self, number: int, deadline_s: float = APPLY_DEADLINE_S) -> Status:
        """The status when it is active and what its apply did has been written down."""

        def is_served(status: Status) -> bool:
            return status["active_version"] == number and status["state"] == "serving"

        return self.wait_for(is_served, f"serving {number}", deadline_s)

    def wait_for_refusal(self, number: int) -> str:
        """The reason."""

        def is_refused(status: Status) -> bool:
            return any(entry["number"] == number for entry in status["refused"])

        status = self.wait_for(is_refused, f"the refusal of {number}", APPLY_DEADLINE_S)
        return next(entry["reason"] for entry in status["refused"] if entry["number"] == number)

    def ask_greedy(self, prompts: Sequence[str], engine: int | None = None) -> tuple[Answers, set[int]]:
        """Each prompt alone: the token ids, and the versions that the answers named.

        `engine` is the data-parallel one that is to answer.
        """
        answers, versions = [], set()
        headers = {} if engine is None else {"x-data-parallel-rank": str(engine)}
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
            response = self.http.post(
                "/v1/completions", json=body | {"return_token_ids": True}, headers=headers
            )
            response.raise_for_status()
            answers.append(response.json()["choices"][0]["token_ids"])
            versions |= named_versions(response.headers)
        return answers, versions

    @contextmanager
    def long_request(self, prompt: str, num_tokens: int) -> Iterator[Future[Streamed]]:
        """Eight completions in one stream, slow enough for reloads; the first token has come."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            has_begun: list[bool] = []
            answer = pool.submit(self.stream, prompt, num_tokens, has_begun)
            deadline = time.monotonic() + APPLY_DEADLINE_S
            while not has_begun and not answer.done():
                assert time.monotonic() < deadline, "the first token did not come"
                time.sleep(0.01)
            yield answer

    def stream(self, prompt: str, num_tokens: int, has_begun: list[bool] | None = None) -> Streamed:
        """Eight completions of so many tokens; `has_begun` is no longer empty when the first token came."""
        body = {"model": MODEL, "prompt": [prompt] * 8, "max_tokens": num_tokens, "temperature": 0.0}
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        text, usage = "", {}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"] if choice["index"] == 0)
                usage = event.get("usage") or usage
                if has_begun is not None:
                    has_begun.append(True)
            versions = named_versions(response.headers)
        return Streamed(text=text, num_tokens=usage["completion_tokens"], versions=versions)


@contextmanager
def live_server(
    directory: Path,
    base: Path,
    exchange: Path,
    apply: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    name: str = "server",
    under: Sequence[str] = (),
) -> Iterator[LiveServer]:
    """Start a server, `under` a command that runs it; wait until it answers. It is ended with the block."""
    plan = plan_server(directory, base, exchange, apply, name)
    command = [*under, *plan.command(), "--served-model-name", MODEL, "--poll-interval-s", "0.1", *flags]
    with running(plan, command, plan.environment() | dict(environment or {})) as server:
        yield server


def plan_server(directory: Path, base: Path, exchange: Path, apply: str, name: str = "server") -> ServerPlan:
    return ServerPlan(
        base=base,
        exchange=exchange,
        apply=apply,
        port=free_port(),
        log=directory / f"{name}.log",
        cache=directory / f"{name}-cache",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=KV_CACHE_BYTES,
        max_lora_rank=8,
    )


@contextmanager
def running(plan: ServerPlan, command: Sequence[str], environment: dict[str, str]) -> Iterator[LiveServer]:
    """Run this command, which makes a server listen on the plan's port, until the end of the block."""
    http = httpx.Client(base_url=plan.url, timeout=APPLY_DEADLINE_S, trust_env=False)
    with Job("server", command, log=plan.log, environment=environment) as job, http:
        server = LiveServer(job, http)
        server.wait_for(lambda status: status["state"] != "starting", "an answer", START_DEADLINE_S)
        yield server
