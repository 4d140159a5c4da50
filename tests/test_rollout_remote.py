"""`weightferry status | watch | rollback | ...` speak HTTP to a server, and end with the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from scripted_server import SERVING

from weightferry.shared.command import main

TOKEN = "a-long-secret"


class Server:
    """Answers GET with `status`, or `versions`, and records what is posted."""

    def __init__(self, url: str) -> None:
        self.url, self.status = url, dict(SERVING)
        self.posted: list[tuple[str, Any, str | None]] = []
        self.answer: tuple[int, Any] = (200, SERVING | {"message": "done", "pinned_version": 2})


@pytest.fixture
def server() -> Iterator[Server]:
    with http_server() as found:
        yield found


@contextmanager
def http_server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/weightferry/versions":
                row = {"number": 2, "step": 20, "created": "today", "refused": None}
                self._send(200, {"versions": [row | {"is_active": False, "is_pinned": True}]})
            else:
                self._send(200 if self.path == "/weightferry/status" else 404, found.status)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.posted.append((self.path, body, self.headers["authorization"]))
            self._send(*found.answer)

        def _send(self, code: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            if code == 302:
                self.send_header("location", f"{found.url}/weightferry/status")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Server(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.delenv("WEIGHTFERRY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("WEIGHTFERRY_TOKEN", TOKEN)


def test_status_says_what_answers_and_why(server, capsys):
    server.status |= {
        "newest_version": 5,
        "pinned_version": 3,
        "refused": [{"number": 5, "kind": "damaged", "reason": "it is cut", "tries": 4, "is_final": True}],
    }
    assert main(["status", server.url, "--versions"]) == 0
    shown = capsys.readouterr().out
    assert "serving: version 3 answers, the newest is 5, pinned, 1 refused" in shown
    assert "5 (damaged, 4 tries, for good): it is cut" in shown
    assert "version   2 step 20 today pinned" in shown
    assert main(["status", server.url.removeprefix("http://"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == server.status


@pytest.mark.parametrize("wrong", [{"state": "unhealthy"}, {"problem": "the exchange is gone"}])
def test_status_of_a_server_with_a_problem_ends_with_1(server, wrong):
    server.status |= wrong
    assert main(["status", server.url]) == 1


def test_watch_prints_each_change_once_and_ends_at_the_wanted_version(server, capsys):
    def move_on() -> None:
        time.sleep(0.2)
        server.status = SERVING | {"active_version": 4, "newest_version": 4}

    mover = threading.Thread(target=move_on)
    mover.start()
    assert main(["watch", server.url, "--until", "4", "--interval-s", "0.02", "--json"]) == 0
    mover.join()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["active_version"] for line in lines] == [3, 4]


def test_watch_gives_up_by_its_deadline_and_at_an_unhealthy_server(server, capsys):
    assert main(["watch", server.url, "--until", "4", "--deadline-s", "0.1", "--interval-s", "0.02"]) == 1
    assert "version 4 was not active within 0 s; 3 is" in capsys.readouterr().err
    server.status |= {"state": "unhealthy"}
    assert main(["watch", server.url]) == 1


@pytest.mark.parametrize(
    ("command", "path", "body"),
    [
        (["rollback", "2"], "rollback", {"number": 2}),
        (["follow"], "unpin", {}),
        (["pause-updates"], "pause-updates", {}),
        (["resume-updates"], "resume-updates", {}),
    ],
)
def test_each_act_goes_to_its_route_with_the_token(server, tmp_path, capsys, command, path, body):
    name, *rest = command
    assert main([name, server.url, *rest]) == 0
    file = tmp_path / "token"
    file.write_text("another\n")
    assert main([name, server.url, *rest, "--token-file", str(file), "--json"]) == 0
    route = f"/weightferry/{path}"
    assert server.posted == [(route, body, f"Bearer {TOKEN}"), (route, body, "Bearer another")]
    assert "version 3 answers, pinned" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "exit_code"), [(404, 1), (409, 1), (503, 1), (400, 2), (401, 2)])
def test_a_refusal_is_one_line_with_the_servers_own_words(server, capsys, code, exit_code):
    server.answer = (code, {"message": "retention has passed it"})
    assert main(["rollback", server.url, "2"]) == exit_code
    assert capsys.readouterr().err == (
        f"weightferry: {server.url} refuses ({code}): retention has passed it\n"
    )


def test_a_redirect_is_not_followed_with_the_token(server, capsys):
    server.answer = (302, {})
    assert main(["rollback", server.url, "2"]) == 1
    assert "refuses (302)" in capsys.readouterr().err


def test_without_a_token_nothing_is_sent(server, monkeypatch, capsys):
    monkeypatch.delenv("WEIGHTFERRY_TOKEN")
    assert main(["rollback", server.url, "2"]) == 2
    assert "give --token-file" in capsys.readouterr().err
    assert server.posted == []


def test_where_no_server_is_the_line_says_so(capsys):
    with http_server() as gone:
        pass
    assert main(["status", gone.url]) == 1
    assert "does not answer" in capsys.readouterr().err
    for wrong in ("no url at all", "ftp://127.0.0.1/", "http://:8000"):
        assert main(["status", wrong]) == 2
        assert "is no address of a server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["status", "watch", "rollback", "follow", "pause-updates", "resume-updates", "serve"]
)
def test_help_needs_neither_torch_nor_vllm_nor_httpx(name):
    script = (
        "import sys; from weightferry.shared.command import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "finally: print({'torch', 'vllm', 'httpx', 'fastapi', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
