"""The package as a whole: what importing it does, which room knows which, what ships, how fast --help is."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightferry.shared.command import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("shared", "exporter", "trainer", "rollout_server", "examples")
MAY_IMPORT = {
    "shared": {"shared"},
    "exporter": {"exporter", "shared"},
    "trainer": {"trainer", "exporter", "shared"},
    "rollout_server": {"rollout_server", "shared"},
    "examples": {"examples", "shared"},
}
HEAVY = ("torch", "vllm", "transformers", "peft")
HELP_BUDGET_S = 0.5
LONGEST_FUNCTION_LINES = 60
LONGEST_FILE_LINES = 350


def product_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))


def all_python_files() -> list[Path]:
    return [*product_files(), *sorted((ROOT / "tests").glob("*.py")), ROOT / ".ci/set_up.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) for each relative import; one dot is the room itself, two dots name another."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield node.lineno, path.parent.name
        elif isinstance(node, ast.ImportFrom) and node.level == 2:
            yield node.lineno, (node.module or node.names[0].name).split(".")[0]


def top_level_packages(path: Path) -> set[str]:
    """The packages that a file imports by absolute names, wherever in the file."""
    imports = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Import)]
    names = {alias.name for node in imports for alias in node.names}
    froms = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names | {node.module or "" for node in froms}}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_weightferry_has_no_effect_and_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import weightferry; print(*(set(sys.modules) - before))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["weightferry"]


def test_the_root_package_is_one_docstring():
    body = tree(ROOT / "__init__.py").body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize(
    "module", ["shared.command", "shared.exchange", "shared.writer", "shared.manifest", "shared.verify"]
)
def test_the_exchange_can_be_read_and_written_without_torch_or_vllm(module: str):
    done = run_python(f"import sys, weightferry.{module}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & set(HEAVY)


def test_each_room_imports_only_the_rooms_below_it():
    broken = [
        f"{name_of(path)}:{line} imports {room}"
        for path in product_files()
        for line, room in imported_rooms(path)
        if room not in MAY_IMPORT[path.parent.name]
    ]
    assert broken == []


def test_inside_the_product_imports_are_relative_and_at_most_two_dots():
    for path in product_files():
        assert "weightferry" not in top_level_packages(path), name_of(path)
        levels = [node.level for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)]
        assert max(levels, default=0) <= 2, name_of(path)


def test_tests_reach_no_private_name_of_the_product():
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weightferry"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert private == [], f"{name_of(path)}:{node.lineno}"


def test_only_one_module_makes_things_durable():
    calls = {"fsync", "fdatasync", "rename", "renames", "link", "hardlink_to"}
    found = {
        name_of(path)
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in calls
    }
    assert found == {"shared/durable.py"}


def test_only_one_module_touches_vllm():
    users = {name_of(path) for path in product_files() if "vllm" in top_level_packages(path)}
    assert users == {"rollout_server/engine.py"}


def test_in_the_exchange_only_the_merge_rule_and_the_bytes_of_tensors_know_torch():
    users = {path.name for path in (ROOT / "shared").glob("*.py") if "torch" in top_level_packages(path)}
    assert users == {"merge.py", "tensor_bytes.py"}


def test_every_folder_of_python_files_is_a_package_that_ships():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - {"tests", "benchmarks", "build"}
    assert folders == set(ROOMS)
    assert set(listed) == {"weightferry", *(f"weightferry.{room}" for room in ROOMS)}
    assert all((ROOT / room / "__init__.py").is_file() for room in ROOMS)
    assert [path for room in ROOMS for path in (ROOT / room).glob("*/**/*.py")] == [], "rooms are flat"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "__init__.py", "py.typed"):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("weightferry-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_and_nothing_else(wheel_names: set[str]):
    modules = {f"weightferry/{name_of(path)}" for path in product_files()} | {"weightferry/__init__.py"}
    assert {name for name in wheel_names if name.endswith(".py")} == modules


def test_the_wheel_holds_the_type_marker_the_licence_and_the_data_of_the_examples(wheel_names: set[str]):
    data = [path for path in (ROOT / "examples").iterdir() if path.suffix in {".txt", ".toml", ".jsonl"}]
    assert {f"weightferry/examples/{path.name}" for path in data} <= wheel_names
    assert "weightferry/py.typed" in wheel_names
    assert any(re.fullmatch(r"weightferry-[^/]*\.dist-info/licenses/LICENSE", name) for name in wheel_names)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_answers_in_under_half_a_second(command: str):
    seconds = []
    for _ in range(5):  # the best of a few: the machine may be busy with something else
        start = time.perf_counter()
        done = subprocess.run(
            [Path(sys.executable).with_name("weightferry"), *command.split(), "--help"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: weightferry")
        if seconds[-1] < HELP_BUDGET_S:
            return
    pytest.fail(
        f"`weightferry {command} --help` took {min(seconds):.2f} s at best; {HELP_BUDGET_S} s are allowed"
    )


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name_of(path)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_every_function_fits_in_one_look():
    too_long = [
        f"{name}: {num_lines} lines"
        for path in all_python_files()
        for name, num_lines in functions(path)
        if num_lines > LONGEST_FUNCTION_LINES
    ]
    assert too_long == []


def test_every_file_is_one_noun_with_a_story_at_its_head():
    for path in all_python_files():
        assert ast.get_docstring(tree(path)), f"{name_of(path)} has no head"
        if path in product_files():
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            assert num_lines <= LONGEST_FILE_LINES, f"{name_of(path)}: {num_lines} lines"


def test_no_product_module_is_called_helpers_or_utils():
    assert {path.stem for path in product_files()} & {"utils", "util", "common", "helpers", "misc"} == set()
