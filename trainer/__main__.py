"""`torchrun --nproc-per-node N -m weightferry.trainer CONFIG.toml`, or `python -m ...` for one process.

Everything that can be known without torch is checked before torch is imported: a mistake is told in a
second, and --help at once. An error of ours is one line on stderr. Where all ranks have the same one, rank 0
tells it: the others wait a moment for torchrun to end them, and speak only if nobody did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from ..shared.checkpoint import Checkpoint
from ..shared.errors import WeightferryError
from .settings import Settings
from .settings_file import load_settings
from .settings_words import help_text

FIRST_RANK_SPEAKS_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of a settings file; 0 when its last version is published, 2 for bad usage, 1 otherwise."""
    args = _parser().parse_args(argv)
    try:
        settings = load_settings(args.config, args.set)
        base = Checkpoint.open(settings.base)
        _run(settings, base)
    except WeightferryError as error:
        _tell(error)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightferry.trainer",
        description="Trains a LoRA on a base by SFT and publishes versions into an exchange.",
        epilog=f"settings:\n{help_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="the settings file")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting over the file's, its value as TOML: --set data.batch_size=4",
    )
    return parser


def _run(settings: Settings, base: Checkpoint) -> None:
    from .loop import train
    from .ranks import Ranks

    with Ranks(timeout_s=settings.rank_timeout_s) as ranks:
        train(settings, base, ranks)


def _tell(error: WeightferryError) -> None:
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        time.sleep(FIRST_RANK_SPEAKS_S)
    speaker = "weightferry trainer" if rank == 0 else f"weightferry trainer, rank {rank}"
    print(f"{speaker}: {error}", file=sys.stderr, flush=True)


def _leave(exit_code: int) -> NoReturn:
    """End without destructors: a communicator whose peers are ending too may abort there (torch 2.13, gloo),
    which would replace the exit code by a signal's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    try:
        exit_code = main()
    except Exception:
        traceback.print_exc()
        _leave(WeightferryError.exit_code)
    if exit_code:
        _leave(exit_code)
