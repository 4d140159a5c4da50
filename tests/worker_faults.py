"""Faults inside a real server: in its worker in the middle of a load, at a tensor of the test's choosing, and
in whoever opens a file of the exchange.

A vLLM plug-in of the tests' own, in every process of a server that `environment` starts: it acts at the
named point of an apply (weightferry/shared/kill_points.py) as files in one directory tell it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

VARIABLE = "WEIGHTFERRY_TEST_FAULTS"
PLUGIN_NAME = "worker_faults"
HOLD_DEADLINE_S = 60.0


class Faults:
    """The test's side: what the next loads run into."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "faults"
        self._directory.mkdir()
        self._install()

    def _install(self) -> None:
        metadata = self._directory / "worker_faults-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: worker-faults\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\n{PLUGIN_NAME} = worker_faults:install\n"
        )
        shutil.copy(__file__, self._directory)

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self._directory), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_PLUGINS": PLUGIN_NAME,
            VARIABLE: str(self._directory),
        }

    def fail(self, *tensors: int, rank: int = 0, engine: int = 0) -> None:
        """The rank's next load fails at this tensor (1: the first), its load after that at the next one."""
        (self._directory / f"fail-{engine}-{rank}").write_text("\n".join(map(str, tensors)))

    def hold(self, tensor: int, *, rank: int = 0) -> None:
        """The rank's next load waits at this tensor (1: the first) until `release`."""
        (self._directory / f"hold-0-{rank}").write_text(str(tensor))

    def hold_open(self, file: Path) -> None:
        """Who opens this file of the exchange next has it open, and waits until `release`."""
        (self._directory / "hold_open").write_text(str(file))

    def wait_until_held(self) -> int:
        """The process that waits."""
        held = self._directory / "held"
        _wait_for(held.exists, "no load came to the tensor")
        return int(held.read_text())

    def release(self) -> None:
        (self._directory / "held").unlink()


def install() -> None:
    """The plug-in's entry point."""
    from weightferry.rollout_server import worker_extension
    from weightferry.shared.store import LocalStore

    directory = Path(os.environ[VARIABLE])
    point, worker = _Point(directory), worker_extension.WeightferryWorker
    load = worker.weightferry_reload

    def counted_load(self, parts):
        point.begin_load(self.parallel_config.data_parallel_index)
        return load(self, parts)

    worker.weightferry_reload = counted_load
    worker_extension.reach = point.reach  # type: ignore[assignment]
    LocalStore.open = _holding(LocalStore.open, directory)  # type: ignore[method-assign]


def _holding(open_file, directory: Path):
    hold, held = directory / "hold_open", directory / "held"

    def open_held(store, path: str):
        file = open_file(store, path)
        if hold.exists() and hold.read_text() == store.where(path):
            hold.unlink()
            _stand(held)
        return file

    return open_held


def _stand(held: Path) -> None:
    """Say that this process waits here, and wait for the test."""
    partial = held.with_suffix(".partial")
    partial.write_text(str(os.getpid()))
    partial.replace(held)
    _wait_for(lambda: not held.exists(), "the test did not let it go on")


class _Point:
    """The worker's side: counts the tensors of each load, and acts at the chosen one."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._held = directory, directory / "held"
        self._num_passed, self._engine = 0, 0

    def begin_load(self, engine: int) -> None:
        self._num_passed, self._engine = 0, engine

    def reach(self, _point: str) -> None:
        where = f"{self._engine}-{_rank()}"
        fail, hold = (self._directory / f"{what}-{where}" for what in ("fail", "hold"))
        self._num_passed += 1
        if fail.exists():
            first, _, others = fail.read_text().partition("\n")
            if self._is_at(first):
                fail.write_text(others) if others else fail.unlink()
                raise OSError(f"a fault of the test's at tensor {self._num_passed} of the load")
        elif hold.exists() and self._is_at(hold.read_text()):
            hold.unlink()
            _stand(self._held)

    def _is_at(self, tensor: str) -> bool:
        return self._num_passed >= int(tensor)


def _rank() -> int:
    import torch.distributed  # not imported in the test's process for this

    return torch.distributed.get_rank()


def _wait_for(is_so, else_say: str) -> None:
    deadline = time.monotonic() + HOLD_DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, else_say
        time.sleep(0.01)
