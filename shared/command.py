"""The `weightferry` command: one table of sub-commands, each in its own module.

Imports nothing heavy, so that every --help answers at once; a sub-command's module is imported when it is
used. `shared` knows the other rooms' commands by name only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from .errors import WeightferryError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubCommand:
    """A sub-command: `module` offers `add[_NAME]_arguments(parser)` and `run[_NAME](args) -> exit code`."""

    help: str
    module: str
    suffix: str = ""
    passes_flags_on: bool = False


COMMANDS = {
    "ls": SubCommand(help="list the versions of an exchange", module="..shared.inspect", suffix="ls"),
    "show": SubCommand(help="show one version", module="..shared.inspect", suffix="show"),
    "verify": SubCommand(
        help="read every byte and say everything that is wrong", module="..shared.inspect", suffix="verify"
    ),
    "pin": SubCommand(help="keep a version for good", module="..shared.operate", suffix="pin"),
    "unpin": SubCommand(help="leave a version to retention", module="..shared.operate", suffix="unpin"),
    "gc": SubCommand(help="delete what retention does not keep", module="..shared.operate", suffix="gc"),
    "materialize": SubCommand(
        help="copy a version into a directory", module="..shared.operate", suffix="materialize"
    ),
    "serve": SubCommand(
        help="serve the newest version with vLLM", module="..rollout_server.serve", passes_flags_on=True
    ),
    "status": SubCommand(
        help="say what a server serves, and why", module="..rollout_server.remote", suffix="status"
    ),
    "watch": SubCommand(
        help="print a line whenever a server's status changes",
        module="..rollout_server.remote",
        suffix="watch",
    ),
    "rollback": SubCommand(
        help="have a server serve a version, and stay there",
        module="..rollout_server.remote",
        suffix="rollback",
    ),
    "follow": SubCommand(
        help="have a server follow the newest version again",
        module="..rollout_server.remote",
        suffix="follow",
    ),
    "pause-updates": SubCommand(
        help="have a server apply nothing for a while", module="..rollout_server.remote", suffix="pause"
    ),
    "resume-updates": SubCommand(
        help="take pause-updates back", module="..rollout_server.remote", suffix="resume"
    ),
    "demo": SubCommand(help="see the whole path run on this machine", module="..examples.demo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; exit code 0, 1 for something wrong, 2 for bad usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="weightferry", description="Carries LoRA policies to live servers.")
    parser.add_argument("--version", action="version", version=f"weightferry {version('weightferry')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name == wanted:
            _function(command, "add", "arguments")(sub)
    args, rest = parser.parse_known_args(arguments)
    if rest and not COMMANDS[args.command].passes_flags_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.vllm_flags = rest
    return _run(_function(COMMANDS[args.command], "run"), args)


def _function(command: SubCommand, verb: str, noun: str = "") -> Callable:
    name = "_".join(part for part in (verb, command.suffix, noun) if part)
    return getattr(import_module(command.module, __package__), name)


def _run(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return run(args)
    except WeightferryError as error:
        print(f"weightferry: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"weightferry: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
