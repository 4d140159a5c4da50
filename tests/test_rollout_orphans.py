"""A process that multiprocessing started ends when its parent was killed, and not before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from processes import is_alive, wait_until_gone

from weightferry.rollout_server.orphans import LOOK_S

PARENT = """
import multiprocessing, sys, time
from weightferry.rollout_server.orphans import end_with_parent

def work():
    end_with_parent()
    time.sleep(60)

if __name__ == "__main__":
    end_with_parent()  # nobody's child: this does nothing
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_child_ends_with_its_killed_parent_and_not_before():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(2.5 * LOOK_S)  # it looks twice
    assert is_alive(child)
    assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=30)
    wait_until_gone([child], "the child outlives its parent", 20)
