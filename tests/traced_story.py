"""A story of an exchange under the interpreter's audit hook; prints what touched a published file, as JSON.

Run as a process of its own by test_field_cases.py, because an audit hook cannot be taken off again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tiny_exchange import make_base, publish

from weightferry.shared.command import main as weightferry
from weightferry.shared.exchange import Exchange
from weightferry.shared.writer import ExchangeWriter

WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND
published: set[str] = set()
touched: list[str] = []
num_events = 0


def watch(event: str, arguments: tuple) -> None:
    global num_events
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        num_events += 1
        if str(arguments[0]) in published and (arguments[2] or 0) & WRITING:
            touched.append(f"open {arguments[0]}")
    elif event in ("os.truncate", "os.chmod", "os.utime"):
        if str(arguments[0]) in published:
            touched.append(f"{event} {arguments[0]}")
    elif event in ("os.rename", "os.link") and str(arguments[1]) in published:
        touched.append(f"{event} over {arguments[1]}")


def enter(directory: Path) -> None:
    published.update(str(path) for path in directory.rglob("*") if path.is_file())


def main() -> None:
    sys.addaudithook(watch)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        url, base = Path(folder, "exchange"), make_base(Path(folder, "base"))
        for run_id in ("first", "second"):
            exchange = Exchange.open(url, base=base)
            writer = ExchangeWriter.become(exchange, run_id=run_id, keep=2, grace_s=0)
            for step in range(3):
                enter(publish(writer, step).path)
                enter(url / "base")
                enter(url / "log")
            writer.close()
        out, sys.stdout = sys.stdout, nowhere
        newest = str(Exchange.open(url).newest_number())
        for words in (
            ["verify", "--repair"],
            ["pin", newest],
            ["gc", "--keep", "1", "--grace-s", "0"],
            ["ls"],
        ):
            weightferry([words[0], str(url), *words[1:]])
        weightferry(["materialize", str(url), newest, str(Path(folder, "copy"))])
        sys.stdout = out
    print(json.dumps({"touched": touched, "num_events": num_events}))


if __name__ == "__main__":
    main()
