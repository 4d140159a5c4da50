"""`weightferry status | watch | rollback | follow | pause-updates | resume-updates`: a server, from afar.

Speaks HTTP to a running rollout server; needs neither vLLM nor httpx. Prints for people, or JSON with --json.
Exit 0 when the server does as it should, 1 when something is wrong (unhealthy, a refusal, no answer), 2 for
bad usage, a wrong token among it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..shared.errors import ConfigError, UsageError, WeightferryError

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "WEIGHTFERRY_TOKEN", "WEIGHTFERRY_TOKEN_FILE"  # as in settings.py
READ_DEADLINE_S = 30.0
# A rollback fetches, verifies and loads a version before it answers.
ACT_DEADLINE_S = 900.0
COLUMNS = ("state", "active_version", "newest_version", "pinned_version", "are_updates_paused", "problem")
Json = dict[str, Any]


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("--versions", action="store_true", help="list what there is to roll back to, too")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("--until", type=int, metavar="N", help="end when version N or a newer one is active")
    parser.add_argument(
        "--deadline-s", type=float, default=600.0, help="give up on --until after this (%(default)s)"
    )
    parser.add_argument("--interval-s", type=float, default=0.5, help="seconds between looks (%(default)s)")


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("number", type=int, help="the version; `weightferry status --versions` lists them")
    _add_token(parser)


def add_follow_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_token(parser)


add_pause_arguments = add_resume_arguments = add_follow_arguments


def run_status(args: argparse.Namespace) -> int:
    status = _ask(args.server, "status")
    if args.versions:
        status["versions"] = _ask(args.server, "versions")["versions"]
    if args.json:
        _print_json(status)
    else:
        _print_status(status)
    return _exit_code(status)


def run_watch(args: argparse.Namespace) -> int:
    seen: Json = {}
    deadline = time.monotonic() + args.deadline_s
    while True:
        status = _ask(args.server, "status")
        line = {name: status[name] for name in COLUMNS} | {"num_refused": len(status["refused"])}
        if line != seen:
            seen = line
            print(json.dumps(line) if args.json else _line(line), flush=True)
        if status["state"] == "unhealthy":
            return 1
        if args.until is not None and status["active_version"] >= args.until:
            return 0
        if args.until is not None and time.monotonic() > deadline:
            raise WeightferryError(
                f"version {args.until} was not active within {args.deadline_s:.0f} s; "
                f"{status['active_version']} is: `weightferry status` says why"
            )
        time.sleep(args.interval_s)


def run_rollback(args: argparse.Namespace) -> int:
    return _act(args, "rollback", {"number": args.number})


def run_follow(args: argparse.Namespace) -> int:
    return _act(args, "unpin")


def run_pause(args: argparse.Namespace) -> int:
    return _act(args, "pause-updates")


def run_resume(args: argparse.Namespace) -> int:
    return _act(args, "resume-updates")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file",
        type=Path,
        default=os.environ.get(TOKEN_FILE_VARIABLE) or None,
        help=f"the file with the server's token (default: ${TOKEN_FILE_VARIABLE}, or ${TOKEN_VARIABLE})",
    )


def _act(args: argparse.Namespace, name: str, body: Json | None = None) -> int:
    answer = _ask(args.server, name, body or {}, token=_token(args.token_file), deadline_s=ACT_DEADLINE_S)
    if args.json:
        _print_json(answer)
    else:
        print(_line(answer))
    return 0


def _token(file: Path | None) -> str:
    try:
        token = os.environ.get(TOKEN_VARIABLE, "") if file is None else Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"this needs the server's token: give --token-file, or set {TOKEN_VARIABLE}")
    return token


def _ask(
    server: str, name: str, body: Json | None = None, *, token: str = "", deadline_s: float = READ_DEADLINE_S
) -> Json:
    """GET, or POST with a body; the answer's JSON, or an error with the server's own words."""
    url = f"{_address(server)}/weightferry/{name}"
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        # never through a proxy: a token goes to the named host, and nowhere else
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        with opener.open(request, timeout=deadline_s) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise _refusal(server, error) from None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise WeightferryError(f"{server} does not answer: {why}; is a rollout server there?") from None
    except ValueError as error:
        raise UsageError(f"{server} is no rollout server; its answer is no JSON: {error}") from None


def _address(server: str) -> str:
    address = server if "://" in server else f"http://{server}"
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in address:
        raise UsageError(f"{server} is no address of a server; expected e.g. http://127.0.0.1:8000")
    return address.rstrip("/")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token elsewhere."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def _refusal(server: str, error: urllib.error.HTTPError) -> WeightferryError:
    text = error.read().decode(errors="replace").strip()
    try:
        words = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        words = text or error.reason
        if error.code == 404:
            words = "it has no such route; is it a rollout server?"
    kind = UsageError if error.code in (400, 401) else WeightferryError
    return kind(f"{server} refuses ({error.code}): {words}")


def _exit_code(status: Json) -> int:
    return 1 if status["state"] == "unhealthy" or status["problem"] else 0


def _line(value: Json) -> str:
    """What is active, and what keeps it so."""
    words = [f"{value['state']}: version {value['active_version']} answers"]
    if value["newest_version"] > value["active_version"]:
        words.append(f"the newest is {value['newest_version']}")
    if value["pinned_version"] is not None:
        words.append("pinned")
    if value["are_updates_paused"]:
        words.append("updates are paused")
    if value.get("num_refused"):
        words.append(f"{value['num_refused']} refused")
    if value.get("problem"):
        words.append(value["problem"])
    return ", ".join(words)


def _print_status(status: Json) -> None:
    print(_line(status | {"num_refused": len(status["refused"])}))
    print(f"  why       {status['why']}")
    print(f"  exchange  {status['exchange']} (--apply {status['apply']})")
    if status["applied"]:
        last = status["applied"][-1]
        print(
            f"  applied   {last['number']} (step {last['step']}): {last['published_to_served_s']:.1f} s "
            f"after its publication, paused {last['pause_s'] * 1e3:.0f} ms, {last['bytes_applied']} bytes"
        )
    for entry in status["refused"]:
        again = "for good" if entry["is_final"] else "will be tried again"
        marks = f"{entry['kind']}, {entry['tries']} tries, {again}"
        print(f"  refused   {entry['number']} ({marks}): {entry['reason']}")
    for row in status.get("versions", ()):
        marks = [word for word in ("active", "pinned") if row[f"is_{word}"]]
        marks += ["refused"] if row["refused"] else []
        print(f"  version   {row['number']} step {row['step']} {row['created']} {' '.join(marks)}".rstrip())


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, sort_keys=True)
    print()
