"""`weightferry ls | show | verify`: look at an exchange from a terminal or a script.

Each prints a table for people, or one JSON value with --json. Exit 0 when whole, 1 when something is
wrong, 2 for bad usage. No lease is taken: these read what is there. Nothing is changed, but by --repair,
which points `latest.json` at the newest version and removes what dead writers and pruners left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, ExchangeError
from .exchange import Exchange, Version
from .manifest import Manifest
from .repair import repair
from .signing import load_checking_key
from .verify import Finding, verify_exchange, verify_version


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exchange", help="the exchange: a directory or a URL")
    _add_json(parser)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exchange", help="the exchange: a directory or a URL")
    parser.add_argument("number", nargs="?", type=int, help="the version (default: the newest)")
    _add_json(parser)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exchange", help="the exchange: a directory or a URL")
    parser.add_argument("number", nargs="?", type=int, help="one version (default: the whole exchange)")
    parser.add_argument(
        "--repair", action="store_true", help="mend the pointer and sweep garbage first; needs no number"
    )
    parser.add_argument("--key", type=Path, help="require signatures by this key (PEM, or an HMAC secret)")
    _add_json(parser)


def run_ls(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    rows = [
        _row(version) | {"pinned": version.number in exchange.log.pinned} for version in exchange.versions()
    ]
    if args.json:
        _print_json(rows)
    elif not rows:
        print(f"{exchange.store.where('')} has no version yet; its base is {exchange.base}")
    else:
        columns = ("number", "step", "run_id", "published", "pinned", "changed", "total", "created")
        _print_table(columns, ([_cell(row[column]) for column in columns] for row in rows))
    return 1 if any(row["problem"] for row in rows) else 0


def run_show(args: argparse.Namespace) -> int:
    exchange = Exchange.open(args.exchange)
    version = exchange.latest() if args.number is None else exchange.version(args.number)
    if version is None:
        print(f"{exchange.store.where('')} has no version yet; its base is {exchange.base}")
        return 0
    if args.json:
        value = json.loads(version.manifest.to_bytes())
        _print_json({"number": version.number, "path": version.store.where(version.dir), "manifest": value})
    else:
        _show(version, version.manifest)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    key = load_checking_key(args.key) if args.key else None
    exchange = Exchange.open(args.exchange, require_signature=key)
    if args.repair and args.number is not None:
        raise ConfigError("--repair mends an exchange, never a version; leave the number out")
    repairs = repair(exchange) if args.repair else []
    if args.number is None:
        findings, subject = verify_exchange(exchange), exchange.store.where("")
        count = f"{len(exchange.log.retained)} versions"
    else:
        version = exchange.version(args.number)
        findings, subject, count = verify_version(version), f"version {args.number}", "it"
    if args.json:
        _print_json({"findings": [finding.to_json() for finding in findings], "repairs": repairs})
    else:
        _print_findings(findings, repairs, subject, count)
    return 1 if findings else 0


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def _row(version: Version) -> dict[str, Any]:
    row: dict[str, Any] = {
        "number": version.number,
        "step": version.step,
        "run_id": version.run_id,
        "created": version.entry.created,
        "path": version.store.where(version.dir),
        "published": None,
        "changed": None,
        "total": None,
        "problem": None,
    }
    try:
        manifest = version.manifest
    except ExchangeError as error:
        return row | {"problem": str(error), "published": "BROKEN"}
    return row | {
        "published": manifest.published,
        "changed": manifest.changed_bytes,
        "total": manifest.size_bytes,
    }


def _show(version: Version, manifest: Manifest) -> None:
    changed = [entry for entry in manifest.tensors if entry.changed]
    lines = {
        "version": f"{version.number} (step {version.step}, epoch {version.epoch}, run {version.run_id})",
        "directory": version.store.where(version.dir),
        "created": f"{manifest.created} by {manifest.writer.host} pid {manifest.writer.pid}, "
        f"world size {manifest.writer.world_size}",
        "base": str(manifest.base),
        "published": manifest.published,
        "bytes": f"{_size(manifest.changed_bytes)} of its own, {_size(manifest.size_bytes)} in all",
        "tensors": f"{len(changed)} changed of {len(manifest.tensors)}",
        "merge": " ".join(f"{key}={value}" for key, value in (manifest.merge or {}).items()) or "none",
        "adapter": "none" if manifest.adapter is None else f"{len(manifest.adapter.modules)} modules",
        "metrics": json.dumps(manifest.metrics),
    }
    for name, value in lines.items():
        print(f"{name:<10} {value}")
    print()
    columns = ("file", "bytes", "xxh3-128")
    prefix = f"{version.dir}/"
    rows = (
        [entry.path.removeprefix(prefix), _size(entry.size_bytes), entry.xxh3_128] for entry in manifest.files
    )
    _print_table(columns, rows)


def _print_findings(findings: Sequence[Finding], repairs: list[str], subject: str, count: str) -> None:
    for line in repairs:
        print(f"MENDED {line}")
    for finding in findings:
        print(f"WRONG {finding}")
    if findings:
        print(f"{subject}: {len(findings)} things are wrong. No version was changed.")
    else:
        print(f"{subject} is whole: every byte of {count} was read and equals its digest")


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, sort_keys=True)
    print()


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in ("file", "run_id"))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "-"
    if value is None:
        return "-"
    return _size(value) if isinstance(value, int) and value >= 1000 else str(value)


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
