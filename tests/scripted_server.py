"""A small HTTP server that answers as a rollout server would: for tests of those who ask one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

# the status of a server that does as it should
SERVING: dict[str, Any] = {
    "state": "serving",
    "active_version": 3,
    "newest_version": 3,
    "pinned_version": None,
    "are_updates_paused": False,
    "problem": None,
    "why": "version 3 was applied",
    "exchange": "/x",
    "apply": "merged",
    "applied": [],
    "refused": [],
}


@dataclass(slots=True)
class Script:
    """What the server says; tests change it while it runs. `asked` records every prompt."""

    answer: Callable[[str], str]
    headers: dict[str, str] = field(default_factory=lambda: {"x-weightferry-version": "0"})
    status: dict[str, Any] = field(
        default_factory=lambda: {"state": "serving", "active_version": 0, "applied": []}
    )
    asked: list[str] = field(default_factory=list)
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def do_GET(self) -> None:
        self._reply(self.script.status)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.script.asked += body["prompt"]
        choices = [
            {"index": i, "text": self.script.answer(prompt)} for i, prompt in enumerate(body["prompt"])
        ]
        self._reply({"choices": choices[::-1]})

    def _reply(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        for name, text in {**self.script.headers, "content-length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """Serve the script on a free port; sets `script.url`."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
