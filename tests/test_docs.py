"""The documents say what is there: links, commands, flags, names and variables are looked up in the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from weightferry.rollout_server.metrics import Metrics
from weightferry.rollout_server.refusals import RefusalKind
from weightferry.rollout_server.settings import ServerSettings, variable
from weightferry.rollout_server.state import STATES, ServerState
from weightferry.shared import kill_points
from weightferry.shared.command import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS = ("shared", "exporter", "trainer", "rollout_server", "examples")
README_WORDS = 900

document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_lines(path: Path) -> Iterator[str]:
    """What stands in code: each line of a fenced block, and each inline span; continued lines are joined."""
    fence = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for block in fence.findall(text_of(path)):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", fence.sub("", text_of(path)))


def product_sources() -> list[Path]:
    return [path for room in ROOMS for path in (ROOT / room).glob("*.py")]


def test_the_readme_is_short():
    assert 100 < len(text_of(ROOT / "README.md").split()) <= README_WORDS


@document
def test_every_relative_link_leads_somewhere(path: Path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(path))
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []


@document
def test_every_file_of_ours_that_is_named_exists(path: Path):
    names = re.findall(
        rf"\b(?:{'|'.join(ROOMS)}|tests|docs)/[\w./-]+\.(?:py|md|json|toml|jsonl)\b", text_of(path)
    )
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_document_that_the_code_cites_exists():
    cited = {
        (name, path.name)
        for path in [*product_sources(), *(ROOT / "tests").glob("*.py")]
        for name in re.findall(r"\bdocs/[\w./-]+\.md\b", text_of(path))
    }
    assert [pair for pair in sorted(cited) if not (ROOT / pair[0]).exists()] == []


@document
def test_every_verb_that_is_named_is_in_the_makefile(path: Path):
    verbs = set(re.findall(r"^([a-z-]+):.*##", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {word for line in code_lines(path) for word in re.findall(r"\bmake ([a-z][a-z-]*)", line)}
    assert named <= verbs


@pytest.fixture(scope="module")
def help_of() -> dict[str, str]:
    command = Path(sys.executable).with_name("weightferry")
    return {
        name: subprocess.run(
            [command, name, "--help"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for name in COMMANDS
    }


@document
def test_every_command_and_flag_that_is_shown_is_in_its_help(path: Path, help_of: dict[str, str]):
    for line in code_lines(path):
        for name, rest in re.findall(r"(?:^|[\s$/])weightferry ([a-z][a-z-]*)(.*)", line):
            assert name in COMMANDS, line
            flags = set(re.findall(r"--[a-z][a-z-]*", rest.split("#")[0]))
            assert {flag for flag in flags if flag not in help_of[name]} == set(), line


@document
def test_every_import_that_is_shown_works_as_written(path: Path):
    for line in code_lines(path):
        for module, names in re.findall(r"from weightferry\.([\w.]+) import ([\w, ]+)", line):
            source = ast.parse(text_of(ROOT / f"{module.replace('.', '/')}.py"))
            defined = {node.name for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            assert {name.strip() for name in names.split(",")} <= defined, line


def test_the_table_of_environment_variables_is_that_of_the_settings():
    rows = re.findall(
        r"^\| `(WEIGHTFERRY_\w+)` \| (\S+) \| (.+?) \|", text_of(ROOT / "docs/operations.md"), re.MULTILINE
    )
    defaults = {None: "required", "": "empty"}
    expected = [
        (
            variable(entry.name),
            defaults.get(entry.metadata["default"], f"`{entry.metadata['default']}`"),
            entry.metadata["sentence"],
        )
        for entry in fields(ServerSettings)
    ]
    assert rows[: len(expected)] == expected
    assert [name for name, _, _ in rows[len(expected) :]] == [kill_points.VARIABLE]


def test_every_environment_variable_of_the_code_is_in_the_table():
    named = {
        name
        for path in product_sources()
        for name in re.findall(r"\bWEIGHTFERRY_[A-Z0-9_]+\b", text_of(path))
    }
    assert {name for name in named if f"| `{name}` |" not in text_of(ROOT / "docs/operations.md")} == set()


def test_the_table_of_metrics_is_that_of_the_server():
    registry = CollectorRegistry()
    Metrics(ServerState(apply="merged", exchange="x"), lambda: 0, registry)
    kinds = re.findall(r"^# TYPE (\w+) (\w+)", generate_latest(registry).decode(), re.MULTILINE)
    served = {(name, kind) for name, kind in kinds if not name.endswith("_created")}
    rows = re.findall(
        r"^\| `(weightferry_\w+)` \| (\w+) \|", text_of(ROOT / "docs/operations.md"), re.MULTILINE
    )
    assert len(rows) == len(set(rows))
    assert set(rows) == served


@pytest.mark.parametrize(("word", "values"), [("kind", RefusalKind), ("state", STATES)])
def test_every_state_and_every_kind_of_refusal_has_its_row_in_the_table(word: str, values: Iterable[str]):
    _, _, table = text_of(ROOT / "docs/operations.md").partition(f"\n| `{word}` | what ")
    rows = re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == list(values)


def test_the_changelog_names_the_version_of_the_package():
    version = re.search(r'^version = "(.+)"', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert version is not None
    assert re.search(rf"^## {re.escape(version.group(1))}\b", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
