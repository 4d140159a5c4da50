"""The cache directory is one server's own while it lives, and nobody's afterwards, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from weightferry.rollout_server.cache_dir import take_cache_dir
from weightferry.shared.errors import ConfigError

TAKE = """
import sys, time
from weightferry.rollout_server.cache_dir import take_cache_dir
print(take_cache_dir(sys.argv[1]), flush=True)
time.sleep(60)
"""


def start_holder(directory: str, temp: str) -> tuple[subprocess.Popen, str]:
    """A process that has taken the directory, and the directory's name."""
    command = [sys.executable, "-c", TAKE, directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": temp})
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_a_second_server_is_refused_while_the_first_lives(tmp_path):
    holder, _ = start_holder(str(tmp_path / "cache"), str(tmp_path))
    try:
        with pytest.raises(ConfigError, match="is another running server's"):
            take_cache_dir(str(tmp_path / "cache"))
    finally:
        kill(holder)
    assert take_cache_dir(str(tmp_path / "cache")) == tmp_path / "cache"


def test_what_a_killed_server_left_in_the_temporary_directory_goes_and_a_living_ones_stays(tmp_path):
    dead, left = start_holder("", str(tmp_path))
    kill(dead)
    living, kept = start_holder("", str(tmp_path))
    try:
        third, _ = start_holder("", str(tmp_path))
        kill(third)
        assert os.path.isdir(kept)
        assert not os.path.exists(left)
    finally:
        kill(living)
