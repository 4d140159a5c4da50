"""`weightferry pin | unpin | gc | materialize`: keep versions, delete what retention does not keep, copy one.

`gc` may run beside a live writer and live readers. It waits, at most for its grace and the longest ttl of a
dead lease, and says what it still could not delete. Exit 0 when done, 1 when something is wrong, 2 for bad
usage. Follows docs/format.md [7].
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .exchange import Exchange
from .lease import LEASE_TTL_S
from .materialize import materialize
from .pins import pin, unpin
from .process import owner_name
from .retention import GRACE_S, Pruner, PruneReport, RetentionPolicy
from .writer import sweep_unfinished

_POLL_S = 0.5


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("number", type=int, help="the version")


def add_unpin_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("number", type=int, help="the version")


def add_gc_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "--keep",
        type=int,
        help="keep so many of the newest versions (default: those that the exchange retains)",
    )
    parser.add_argument(
        "--keep-every", type=int, help="of the older ones keep those at multiples of this step"
    )
    parser.add_argument(
        "--grace-s", type=float, default=GRACE_S, help="seconds that readers get (%(default)s)"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=LEASE_TTL_S + GRACE_S,
        help="give up on held versions after so many seconds (%(default)s)",
    )


def add_materialize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exchange", help="the exchange: a directory or a URL")
    parser.add_argument("number", type=int, help="the version")
    parser.add_argument("directory", type=Path, help="the directory to make; it must not exist yet")


def run_materialize(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    with exchange.open_version(args.number, reader=owner_name()) as version:
        directory = materialize(version, args.directory.absolute())
    print(f"{directory} holds version {version.number}: {len(version.manifest.files)} files, each checked")
    return 0


def run_pin(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    exchange.version(args.number)
    new = args.number not in exchange.log.pinned if args.dry_run else pin(exchange, args.number)
    return _say(args, {"number": args.number, "pinned": True, "changed": new}, "is pinned")


def run_unpin(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    exchange.log.absorb()
    was = args.number in exchange.log.pinned if args.dry_run else unpin(exchange, args.number)
    return _say(args, {"number": args.number, "pinned": False, "changed": was}, "is not pinned")


def run_gc(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    policy = RetentionPolicy(keep=args.keep, keep_every=args.keep_every)
    pruner = Pruner(exchange, policy, grace_s=args.grace_s)
    if args.dry_run:
        report, swept = _foresee(pruner), sweep_unfinished(exchange, dry_run=True)
    else:
        pruner.give_up()
        report, swept = _prune(pruner, args.wait_s), sweep_unfinished(exchange)
    value = asdict(report) | {"swept": swept, "retained": [v.number for v in exchange.versions()]}
    if args.json:
        _print_json(value | {"dry_run": args.dry_run})
    else:
        _print_report(value, "would be" if args.dry_run else "were")
    return 0


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exchange", help="the exchange: a directory or a URL")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, only say what would happen")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _foresee(pruner: Pruner) -> PruneReport:
    """What `gc` would delete if no reader came or went."""
    exchange = pruner.exchange
    exchange.log.absorb()
    decided = pruner.decide() or exchange.log.retention
    leaving = [entry for entry in exchange.log.retained if not decided.keeps(entry.number)]
    numbers = [entry.number for entry in [*pruner.waiting(), *leaving]]
    held = pruner.leased(numbers)
    holding = {one.number for one in held}
    return PruneReport(removed=tuple(n for n in numbers if n not in holding), held=tuple(held))


def _prune(pruner: Pruner, wait_s: float) -> PruneReport:
    deadline, removed = time.monotonic() + wait_s, []
    while True:
        report = pruner.advance()
        removed += report.removed
        if not report.held or time.monotonic() >= deadline:
            return PruneReport(removed=tuple(removed), held=report.held)
        time.sleep(min(_POLL_S, max(0.0, pruner.grace_s)) or _POLL_S)


def _say(args: argparse.Namespace, value: dict[str, Any], words: str) -> int:
    if args.json:
        _print_json(value | {"dry_run": args.dry_run})
    else:
        how = "already" if not value["changed"] else "would be so" if args.dry_run else "now"
        print(f"version {value['number']} {words} ({how})")
    return 0


def _print_report(value: dict[str, Any], verb: str) -> None:
    print(f"{len(value['removed'])} versions {verb} deleted: {_list(value['removed'])}")
    print(f"{len(value['swept'])} unfinished directories {verb} removed: {_list(value['swept'])}")
    print(f"{len(value['retained'])} versions are retained: {_list(value['retained'])}")
    for held in value["held"]:
        print(f"version {held['number']} waits: {held['reason']}; run gc again later")


def _list(items: list[Any]) -> str:
    return ", ".join(map(str, items)) or "none"


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, sort_keys=True)
    print()
