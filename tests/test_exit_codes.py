"""What commands end with: every exit code that docs/operations.md names, by a real call, and no other."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from scripted_server import SERVING
from tiny_exchange import make_base, publish, writing
from tiny_model import make_tiny_model
from vllm_server import START_DEADLINE_S, live_server, plan_server

from weightferry.examples.demo_jobs import Job
from weightferry.shared import errors
from weightferry.shared.command import main
from weightferry.shared.exchange import Exchange

OPERATIONS = Path(__file__).resolve().parent.parent / "docs/operations.md"
COMMAND = [sys.executable, "-m", "weightferry.shared.command"]
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A base, an exchange of one version, a directory, and the address of a server."""

    directory: Path
    base: Path
    exchange: Path
    number: int
    url: str

    def run(self, *words: object) -> int:
        """The command in this process."""
        try:
            return main([*map(str, words)])
        except SystemExit as end:  # argparse's own
            return int(end.code or 0)

    def serve(self, *words: object) -> int:
        """It would replace this process, so it gets one."""
        command = [*COMMAND, "serve", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode


@pytest.fixture
def status() -> dict[str, Any]:
    """What the server says of itself."""
    return dict(SERVING)


@pytest.fixture
def place(tmp_path, status, monkeypatch) -> Iterator[Place]:
    monkeypatch.setenv("WEIGHTFERRY_TOKEN", "a-token")
    base = make_base(tmp_path / "base")
    with writing(Exchange.open(tmp_path / "exchange", base=base)) as writer:
        number = publish(writer, 1).number
    with answering(status) as url:
        yield Place(directory=tmp_path, base=base, exchange=tmp_path / "exchange", number=number, url=url)


@contextmanager
def answering(status: dict[str, Any]) -> Iterator[str]:
    """A server that tells its status, and takes no token but "a-token"; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, status)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            is_known = self.headers["authorization"] == "Bearer a-token"
            self._send(409 if is_known else 401, {"message": "no"})

        def _send(self, code: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def damaged(place: Place) -> Path:
    """The exchange, with a file of its version cut."""
    next(place.exchange.rglob("layer-00000.safetensors")).write_bytes(b"short")
    return place.exchange


def interrupted(place: Place) -> int:
    """Ctrl-C to a watch that has begun."""
    command = [*COMMAND, "watch", place.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        return watch.wait(DEADLINE_S)


LOOKING: dict[int, list[Callable[[Place], int]]] = {
    0: [
        lambda place: place.run("ls", place.exchange),
        lambda place: place.run("verify", place.exchange),
        lambda place: place.run("gc", place.exchange, "--keep", 1, "--dry-run"),
        lambda place: place.run("materialize", place.exchange, place.number, place.directory / "copy"),
    ],
    1: [
        lambda place: place.run("show", place.exchange, 99),
        lambda place: place.run("pin", place.exchange, 99),
        lambda place: place.run("verify", damaged(place)),
        lambda place: place.run("materialize", damaged(place), place.number, place.directory / "copy"),
    ],
    2: [
        lambda place: place.run("ls", place.directory / "nowhere"),
        lambda place: place.run("ls", place.exchange, "--unknown"),
        lambda place: place.run("gc", place.exchange, "--keep", "some"),
    ],
}
SERVER: dict[int, list[Callable[[Place], int]]] = {
    0: [
        lambda place: place.run("status", place.url),
        lambda place: place.run("watch", place.url, "--until", 3),
    ],
    1: [
        lambda place: place.run("status", "http://127.0.0.1:1"),
        lambda place: place.run("rollback", place.url, 2),
    ],
    2: [
        lambda place: place.run("status"),
        lambda place: place.run("rollback", place.url, 2, "--token-file", place.base / "config.json"),
    ],
    130: [interrupted],
}


def calls_of(table: dict[int, list[Callable[[Place], int]]]) -> list[Any]:
    return [
        pytest.param(code, call, id=f"{code}-{n}") for code in table for n, call in enumerate(table[code])
    ]


@pytest.mark.parametrize(("code", "call"), [*calls_of(LOOKING), *calls_of(SERVER)])
def test_each_command_ends_with_the_code_that_is_written_down(place, code, call):
    assert call(place) == code


@pytest.mark.parametrize("wrong", [{"state": "unhealthy"}, {"problem": "another base"}])
def test_a_status_that_is_wrong_ends_with_1(place, status, wrong):
    status.update(wrong)
    assert place.run("status", place.url) == 1


def test_the_codes_of_the_commands_are_those_that_were_tried():
    sentences = re.findall(r"Exit codes: (.*?)\.\n", OPERATIONS.read_text(), re.DOTALL)
    named = [{int(code) for code in re.findall(r"(?:^|, |,\n)(\d+) ", text)} for text in sentences]
    assert named == [set(SERVER), set(LOOKING)]


def test_the_codes_of_serve_are_those_that_are_tried_here():
    _, _, rest = OPERATIONS.read_text().partition("| exit code | after | do |\n|---|---|---|\n")
    rows = re.findall(r"^\| (.+?) \|", rest.partition("\n\n")[0], re.MULTILINE)
    assert rows == ["0", "1", "2", "137, or -9"]


def test_serve_ends_with_2_for_what_must_be_changed_first(place):
    absent, free = place.directory / "absent", ("--exchange", place.directory / "new")
    assert place.serve(absent, *free) == errors.BaseCheckpointError.exit_code == 2
    assert place.serve(place.base, *free, "--apply", "other") == 2
    another = make_base(place.directory / "another", seed=1)
    assert place.serve(another, "--exchange", place.exchange) == errors.BaseMismatchError.exit_code == 2


def test_serve_ends_with_1_for_an_exchange_that_cannot_be_read(place):
    (place.exchange / "exchange.json").write_text("{")
    assert place.serve(place.base, "--exchange", place.exchange) == errors.FormatError.exit_code == 1


def test_what_the_caller_must_change_ends_with_2_and_all_else_with_1():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        assert issubclass(kind, errors.WeightferryError)
        assert kind.exit_code == (2 if issubclass(kind, errors.UsageError) else 1), kind


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_serve_ends_with_1_where_vllm_does_not_start(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    plan = plan_server(tmp_path, base, tmp_path / "exchange", "merged")
    command = [*plan.command(), "--kv-cache-memory-bytes", "1"]
    with Job("server", command, log=plan.log, environment=plan.environment()) as job:
        assert job._process.wait(START_DEADLINE_S) == 1
    assert "KV cache" in plan.log.read_text()  # vLLM's own words


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kill", "code"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "Ctrl-C", "killed"],
)
def test_serve_ends_by_a_signal_with_the_code_that_is_written_down(tmp_path, kill, code):
    base = make_tiny_model(tmp_path / "base")
    with live_server(tmp_path, base, tmp_path / "exchange", "merged") as server:
        assert server.end(kill) == code
