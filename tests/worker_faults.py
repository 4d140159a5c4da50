"""Faults inside a real server's worker, in the middle of a load, at a tensor of the test's choosing.

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

    def fail(self, *tensors: int) -> None:
        """The next load fails after this tensor (0: the first), the one after it after the next number."""
        (self._directory / "fail").write_text("\n".join(map(str, tensors)))

    def hold(self, tensor: int) -> None:
        """The next load waits after this tensor until `release`."""
        (self._directory / "hold").write_text(str(tensor))

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

    worker_extension.reach = _Point(Path(os.environ[VARIABLE])).reach  # type: ignore[assignment]


class _Point:
    """The worker's side: counts the tensors of each fault as it comes to them."""

    def __init__(self, directory: Path) -> None:
        self._fail, self._hold, self._held = (directory / name for name in ("fail", "hold", "held"))
        self._num_passed = 0

    def reach(self, _point: str) -> None:
        self._num_passed += 1
        if self._fail.exists():
            first, _, others = self._fail.read_text().partition("\n")
            if self._is_at(first):
                self._fail.write_text(others) if others else self._fail.unlink()
                raise OSError(f"a fault of the test's after tensor {first}")
        elif self._hold.exists() and self._is_at(self._hold.read_text()):
            self._hold.unlink()
            partial = self._held.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            partial.replace(self._held)
            _wait_for(lambda: not self._held.exists(), "the test did not let the load go on")
        else:
            return
        self._num_passed = 0

    def _is_at(self, tensor: str) -> bool:
        return self._num_passed > int(tensor)


def _wait_for(is_so, else_say: str) -> None:
    deadline = time.monotonic() + HOLD_DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, else_say
        time.sleep(0.01)
