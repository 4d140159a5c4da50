"""Sixteen clients, streaming and not, while versions are applied by the hundred: no request fails, and each
answer is that of the versions it names, token by token.

With merged weights a request may outlive an apply: its tokens are then a beginning under one version and a
continuation of that very beginning under a later one, never a mixture; with `--pause-mode wait`, as with
adapters, each answer is of one version. The continuations are asked anew from the server, held at each
version, after the load; that a server held at a version answers as a fresh engine does is checked before it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fresh_engine import MAX_TOKENS, ask_fresh_engines, rank_environment
from reissue import Reissuer, make_contents, reissuing
from tiny_model import make_tiny_model
from vllm_server import APPLY_DEADLINE_S, MODEL, LiveServer, live_server

from weightferry.examples.demo_client import VERSION_AT_ARRIVAL_HEADER, VERSION_HEADER

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CLIENTS = 16
# by data-parallel engines; on two cores the processes of two engines leave little to everybody else
NUM_APPLIES = {1: 200, 2: 40}
PROMPTS = [f"{i} + {7 * i} = " for i in range(6)] + ["alpha " * 30, "bravo " * 30]

KINDS = ("streaming", "whole", "streaming", "by tokens")  # of clients

Tokens = list[int]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One response: its tokens, and the versions that were active at its arrival, head and end.

    `spans`: what vLLM itself says of them, [version, first token, end], where it does; None elsewhere.
    """

    prompt: str
    tokens: Tokens
    at_arrival: int
    at_head: int
    at_end: int
    spans: list[tuple[int, int, int]] | None = None
    num_explained: int = 0
    version: int = field(default=0)


def ask_one(http: httpx.Client, prompt: str | Tokens, num_tokens: int) -> tuple[Tokens, httpx.Headers]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0}
    response = http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    response.raise_for_status()
    return response.json()["choices"][0]["token_ids"], response.headers


def tokenize(http: httpx.Client, prompt: str) -> Tokens:
    return http.post("/tokenize", json={"model": MODEL, "prompt": prompt}).raise_for_status().json()["tokens"]


def ask_by_tokens(http: httpx.Client, prompt: Tokens) -> tuple[Tokens, list[Any], httpx.Headers]:
    """Of vLLM's token-in/token-out route, which names the version of each token span."""
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling}
    response = http.post("/inference/v1/generate", json=body).raise_for_status()
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["weight_versions"], response.headers


def ask_streaming(http: httpx.Client, prompt: str) -> tuple[Tokens, httpx.Headers]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    tokens: Tokens = []
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                tokens += [token for choice in choices for token in choice["token_ids"] or ()]
    return tokens, response.headers


def answer_to(http: httpx.Client, prompt: str, kind: str) -> Answer:
    spans = None
    if kind == "streaming":
        tokens, headers = ask_streaming(http, prompt)
        # its head came with the first token: what became active since is known from a later response
        at_end = int(http.get("/health").headers[VERSION_HEADER])
    elif kind == "by tokens":
        tokens, found, headers = ask_by_tokens(http, tokenize(http, prompt))
        spans = [(int(span["version"]), span["start"], span["end"]) for span in found]
        at_end = int(headers[VERSION_HEADER])
    else:
        tokens, headers = ask_one(http, prompt, MAX_TOKENS)
        at_end = int(headers[VERSION_HEADER])
    at_head = int(headers[VERSION_HEADER])
    at_arrival = int(headers.get(VERSION_AT_ARRIVAL_HEADER, at_head))
    return Answer(
        prompt=prompt,
        tokens=tokens,
        at_arrival=at_arrival,
        at_head=at_head,
        at_end=at_end,
        spans=spans,
        version=spans[0][0] if spans else at_arrival,
    )


class Load:
    """Clients that ask without a pause until they are stopped; a failure ends the test."""

    def __init__(self, server: LiveServer, kinds: Sequence[str]) -> None:
        self._server, self._stop, self._kinds = server, threading.Event(), kinds
        self.answers: list[Answer] = []

    def run_while(self, act) -> None:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]
            try:
                act()
            finally:
                self._stop.set()
            for client in clients:
                client.result(APPLY_DEADLINE_S)  # raises what failed

    def _ask(self, client: int) -> None:
        kind, url = self._kinds[client % len(self._kinds)], self._server.http.base_url
        # a connection for each request: one that was kept may be closed by the server just when it is used
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=url, timeout=APPLY_DEADLINE_S, trust_env=False, limits=limits) as http:
            for turn in itertools.count(client):
                if self._stop.is_set():
                    return
                self.answers.append(answer_to(http, PROMPTS[turn % len(PROMPTS)], kind))


def apply_many(server: LiveServer, reissuer: Reissuer, num_applies: int) -> None:
    for _ in range(num_applies):
        server.wait_for_version(reissuer.issue())


def explain(server: LiveServer, reissuer: Reissuer, answers: list[Answer]) -> None:
    """Walk through each answer's versions, each continuing what is explained so far, until nothing is left.

    A later change of versions is never worse: what a version continues, it continues from later on as well.
    """
    left = answers
    while left:
        number = reissuer.issue()
        server.wait_for_version(number)
        content = reissuer.content_of(number)
        due = [a for a in left if reissuer.content_of(a.version) == content]
        wanted = {(a.prompt, tuple(a.tokens[: a.num_explained])) for a in due}
        known = continuations(server, sorted(wanted), number)
        for answer in due:
            continuation = known[answer.prompt, tuple(answer.tokens[: answer.num_explained])]
            if not advance(answer, continuation):
                answer.version = reissuer.next_after(answer.version)
                assert answer.version <= answer.at_end, f"no version explains the rest of {answer}"
        left = [answer for answer in left if answer.num_explained < len(answer.tokens)]


def continuations(
    server: LiveServer, wanted: list[tuple[str, tuple[int, ...]]], number: int
) -> dict[tuple[str, tuple[int, ...]], Tokens]:
    """What this version continues each prompt and beginning with."""
    found = {}
    tokens_of = {prompt: tokenize(server.http, prompt) for prompt, _ in wanted}
    for prompt, beginning in wanted:
        tokens = [*tokens_of[prompt], *beginning]
        found[prompt, beginning], headers = ask_one(server.http, tokens, MAX_TOKENS - len(beginning))
        assert int(headers[VERSION_HEADER]) == number
    return found


def advance(answer: Answer, continuation: Tokens) -> bool:
    """Explain as much of the answer as this continuation of its beginning does; whether that is all."""
    if answer.spans is not None:
        return advance_span(answer, continuation)
    for expected in continuation:
        if answer.tokens[answer.num_explained] != expected:
            break
        answer.num_explained += 1
    assert answer.num_explained or answer.version < answer.at_head, (
        f"its head names too early a version: {answer}"
    )
    return answer.num_explained == len(answer.tokens)


def advance_span(answer: Answer, continuation: Tokens) -> bool:
    """Explain the next token span, whole, by the version that it names."""
    assert answer.spans is not None
    version, start, end = answer.spans.pop(0)
    assert answer.at_arrival <= version <= answer.at_end
    assert start == answer.num_explained
    assert answer.tokens[start:end] == continuation[: end - start], (version, start, end, answer)
    answer.num_explained = end
    if answer.spans:
        answer.version = answer.spans[0][0]
    return True


@pytest.mark.parametrize(
    ("apply", "pause", "num_engines"),
    [
        ("merged", "keep", 1),
        ("fold", "keep", 1),
        ("adapter", "keep", 1),
        ("merged", "wait", 1),
        ("fold", "wait", 1),
        ("merged", "keep", 2),
    ],
)
def test_under_load_no_request_fails_and_every_answer_is_that_of_the_versions_it_names(
    tmp_path, apply, pause, num_engines
):
    base = make_tiny_model(tmp_path / "base")
    contents = make_contents(tmp_path, base, 3)
    num_applies = NUM_APPLIES[num_engines]
    is_adapter, title = apply == "adapter", f"{apply}, {pause}, {num_engines} engines"
    starts = [(base, c.directory / "adapter") if is_adapter else (c.directory, None) for c in contents]
    fresh = ask_fresh_engines(PROMPTS, starts)
    exchange = tmp_path / "exchange"
    flags = ("--pause-mode", pause, "--enable-scale-out", "--data-parallel-size", str(num_engines))
    environment = rank_environment(num_engines) if num_engines > 1 else None
    with (
        live_server(tmp_path, base, exchange, apply, *flags, environment=environment) as server,
        reissuing(exchange, base, contents, keep=3, grace_s=1.0) as reissuer,
    ):
        for reference in fresh:
            server.wait_for_version(reissuer.issue())
            assert server.ask_greedy(PROMPTS)[0] == reference
        load = Load(server, KINDS[:2] if is_adapter else KINDS)
        load.run_while(lambda: apply_many(server, reissuer, num_applies))
        assert server.status()["refused"] == []
        answers = load.answers
        assert len(answers) > num_applies
        assert all(len(answer.tokens) == MAX_TOKENS for answer in answers)
        is_one_version = is_adapter or pause == "wait"
        if is_one_version:
            for answer in answers:  # a request keeps the adapter that it was given, or ends before an apply
                assert answer.at_arrival == answer.at_head
                answer.at_end = answer.at_head
        spanning = [answer for answer in answers if answer.at_end > answer.at_arrival]
        assert is_one_version == (not spanning)
        with_spans = [answer for answer in answers if answer.spans is not None]
        num_split = sum(len(answer.spans or ()) > 1 for answer in with_spans)
        assert is_adapter or with_spans
        assert not (is_one_version and num_split)
        explain(server, reissuer, answers)
        print(f"{title}: {len(with_spans)} answers named token spans, {num_split} more than one")
        pauses = [entry["pause_s"] for entry in server.status()["applied"]]
        print(f"{title}: median pause {statistics.median(pauses):.3f} s, longest {max(pauses):.3f} s")
        print(f"{title}: {len(answers)} answers, {len(spanning)} of them across an apply; none failed")
