"""`weightferry demo`: the whole path on one machine, live.

Makes a small base once, starts a rollout server on it, starts a trainer with two ranks as another job, and
shows version after version as it is published, applied and asked over HTTP. The two jobs meet only in the
exchange and over HTTP, as they would on two machines. Success is checked, not assumed: the last published
version must be the one that answers, it must have learned the task, and its files must verify.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

MODELS = ("addition", "gemma3-270m")
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `weightferry demo`."""
    parser.add_argument(
        "--dir", type=Path, default=Path(".demo"), help="where everything goes (default: .demo)"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=MODELS[0],
        help="addition: 300 000 parameters, made here; gemma3-270m: a real model, 244 MB, Gemma terms",
    )
    parser.add_argument(
        "--apply",
        choices=("merged", "fold", "adapter"),
        default="merged",
        help="how the server applies a version",
    )
    parser.add_argument("--steps", type=int, help="training steps (default: 240; 12 for gemma3-270m)")
    parser.add_argument("--publish-every", type=int, help="steps between versions (default: 20; 4)")
    parser.add_argument("--port", type=int, default=0, help="the server's port (default: 0, any free one)")
    parser.add_argument(
        "--accept-gemma-terms", action="store_true", help="accept the Gemma terms of use without being asked"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 only if every check held."""
    from .demo_run import run_demo

    with _terminated_as_interrupted():
        try:
            run_demo(args)
        except KeyboardInterrupt:
            print("interrupted; the server and the trainer were ended")
            return INTERRUPTED
    return 0


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that both jobs are ended on the way out."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
