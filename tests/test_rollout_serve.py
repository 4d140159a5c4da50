"""`weightferry serve`: bad input is one line and exit code 2; the rest becomes vLLM's command line."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from network_calls import STRACE, addresses, traced
from tiny_exchange import make_base

from weightferry.rollout_server.cache_dir import take_cache_dir
from weightferry.rollout_server.closed_routes import require_closed
from weightferry.rollout_server.engine import (
    WORKER_EXTENSION,
    require_tested_version,
)
from weightferry.rollout_server.fitting_start import require_fitting_start
from weightferry.rollout_server.plugin import RolloutPlugin
from weightferry.rollout_server.serve import server_command, vllm_environment
from weightferry.rollout_server.settings import ServerSettings
from weightferry.shared.errors import ConfigError, UnsupportedError
from weightferry.shared.exchange import Exchange

OPENING = (
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ENABLE_RESPONSES_API_STORE",
    "VLLM_SKIP_MODEL_NAME_VALIDATION",
)
SERVE = [sys.executable, "-m", "weightferry.shared.command", "serve"]


def serve(*arguments: object, under: Sequence[str] = ()) -> subprocess.CompletedProcess:
    command = [*under, *SERVE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def refused(*arguments: object, under: Sequence[str] = ()) -> str:
    done = serve(*arguments, under=under)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_base_without_weights_is_refused(tmp_path):
    assert "has no weights" in refused(tmp_path, "--exchange", tmp_path / "x")


@pytest.mark.parametrize("name", ["org/name", "../absent", "/absent", "link", "hf://org/name"])
def test_case_15_what_is_no_local_directory_is_refused_without_asking_any_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (tmp_path / "link").symlink_to("/absent")
    assert "is not a directory" in refused(name, "--exchange", "x", under=traced(tmp_path / "calls"))
    assert STRACE is None or addresses(tmp_path / "calls", "connect") == set()


@pytest.mark.parametrize("name", OPENING)
def test_case_15_a_server_that_would_open_vllm_s_own_control_is_refused(tmp_path, monkeypatch, name):
    base = make_base(tmp_path / "base")
    for value in ("1", "true", "TRUE ", "2"):
        monkeypatch.setenv(name, value)
        assert f"{name} opens vLLM's" in refused(base, "--exchange", tmp_path / "x")
    for value in ("", "0", "false", " False"):
        require_closed({name: value})


def test_case_15_a_plain_vllm_that_opens_its_own_control_does_not_start(monkeypatch):
    monkeypatch.setattr("weightferry.rollout_server.plugin._show_log", lambda: None)
    monkeypatch.setenv("WEIGHTFERRY_EXCHANGE", "/x")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(UnsupportedError, match="VLLM_SERVER_DEV_MODE opens"):
        asyncio.run(RolloutPlugin().init_state(object(), None, Namespace()))


def test_vllm_talks_over_loopback_unless_it_runs_on_several_hosts_or_is_told_otherwise():
    assert vllm_environment([], {})["VLLM_HOST_IP"] == "127.0.0.1"
    assert vllm_environment([], {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert vllm_environment([], {"VLLM_HOST_IP": "10.0.0.1"})["VLLM_HOST_IP"] == "10.0.0.1"
    for flags in (["--nnodes", "2"], ["--nnodes=2"], ["--distributed-executor-backend", "ray"]):
        assert vllm_environment(flags, {}).keys().isdisjoint({"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"})
    assert vllm_environment([], {"HF_HUB_OFFLINE": "0"})["HF_HUB_OFFLINE"] == "1"


def test_an_exchange_of_another_base_is_refused(tmp_path):
    Exchange.open(tmp_path / "x", base=make_base(tmp_path / "one"))
    assert "another base" in refused(make_base(tmp_path / "two", seed=1), "--exchange", tmp_path / "x")


def test_a_port_in_use_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(make_base(tmp_path / "base"), "--exchange", tmp_path / "x", "--port", port)
    assert f"127.0.0.1:{port}" in message


def test_a_cache_directory_of_a_running_server_is_refused(tmp_path):
    cache = str(tmp_path / "cache")
    take_cache_dir(cache)  # this process is the other server, until it ends
    message = refused(make_base(tmp_path / "base"), "--exchange", tmp_path / "x", "--cache-dir", cache)
    assert "is another running server's" in message


def test_a_setting_that_is_no_number_is_refused(tmp_path):
    message = refused(make_base(tmp_path / "base"), "--exchange", tmp_path / "x", "--poll-interval-s", "soon")
    assert "'soon': expected a number above 0" in message


def arguments(*vllm_flags: str, apply: str = "merged") -> Namespace:
    return Namespace(model="/m", host="127.0.0.1", port=8000, apply=apply, vllm_flags=list(vllm_flags))


def test_flags_pass_through_and_the_users_own_win():
    command = server_command(
        arguments("--max-model-len", "64", "--max-loras=7", apply="adapter"), is_cpu=True
    )
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert "--max-model-len" in command
    assert "--max-loras=7" in command
    assert "--max-loras" not in command
    assert {"--enable-lora", "--enforce-eager", "--worker-extension-cls"} <= set(command)
    assert "--enforce-eager" not in server_command(arguments(), is_cpu=False)


def test_our_middleware_is_the_last_and_so_the_outermost():
    command = server_command(arguments("--middleware", "users.own"), is_cpu=True)
    names = [command[i + 1] for i, word in enumerate(command) if word == "--middleware"]
    assert names == ["users.own", "weightferry.rollout_server.version_header.VersionHeader"]


def test_settings_come_from_the_environment_and_are_checked():
    settings = ServerSettings.from_environment({"WEIGHTFERRY_EXCHANGE": "/x", "WEIGHTFERRY_APPLY": "adapter"})
    assert (settings.exchange, settings.apply) == ("/x", "adapter")
    assert ServerSettings.from_environment(settings.to_environment()) == settings
    for name, value in {
        "MAX_TRIES": "1.5",
        "DEADLINE_S": "inf",
        "RETRY_S": "0",
        "POLL_INTERVAL_S": "soon",
    }.items():
        with pytest.raises(ConfigError, match=f"WEIGHTFERRY_{name}='{value}': expected a (whole )?number"):
            ServerSettings.from_environment({"WEIGHTFERRY_EXCHANGE": "/x", f"WEIGHTFERRY_{name}": value})
    with pytest.raises(ConfigError, match="WEIGHTFERRY_EXCHANGE is not set"):
        ServerSettings.from_environment({})
    with pytest.raises(ConfigError, match="WEIGHTFERRY_APPLY='fast'"):
        ServerSettings.from_environment({"WEIGHTFERRY_EXCHANGE": "/x", "WEIGHTFERRY_APPLY": "fast"})


ASKS_ALL = SimpleNamespace(call_utility_all_async=None)
TWO_ENGINES: dict[str, object] = {"data_parallel_size": 2, "data_parallel_size_local": 2}


def engine_client(**wrong: object) -> SimpleNamespace:
    """As much of vLLM's EngineClient as is looked at, right but for what is named."""
    right = {
        "_api_process_count": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_backend": "mp",
        "is_moe": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": True,
        "quantization": None,
        "lora_config": None,
        "kv_transfer_config": None,
        "ec_transfer_config": None,
    }
    values = SimpleNamespace(**right | wrong)
    config = SimpleNamespace(
        parallel_config=values,
        model_config=values,
        lora_config=values.lora_config,
        kv_transfer_config=values.kv_transfer_config,
        ec_transfer_config=values.ec_transfer_config,
    )
    return SimpleNamespace(vllm_config=config, engine_core=wrong.get("engine_core", ASKS_ALL))


@pytest.mark.parametrize(
    ("wrong", "apply", "words"),
    [
        ({"_api_process_count": 2}, "merged", "--api-server-count 1"),
        ({"data_parallel_size": 2}, "merged", "not all of the 2 data-parallel engines are on this host"),
        (TWO_ENGINES | {"data_parallel_external_lb": True}, "merged", "without external or hybrid"),
        (TWO_ENGINES | {"data_parallel_hybrid_lb": True}, "merged", "without external or hybrid"),
        (TWO_ENGINES | {"data_parallel_backend": "ray"}, "merged", "--data-parallel-backend mp"),
        (TWO_ENGINES | {"is_moe": True}, "merged", "dense models"),
        (TWO_ENGINES | {"engine_core": SimpleNamespace()}, "merged", "vLLM 0.32 alone"),
        ({"worker_extension_cls": ""}, "merged", "--worker-extension-cls weightferry"),
        ({"enforce_eager": False}, "merged", "--enforce-eager"),
        ({"quantization": "awq"}, "merged", "--apply adapter"),
        ({"ec_transfer_config": "some"}, "merged", "without --ec-transfer-config"),
        ({}, "adapter", "--enable-lora"),
    ],
)
def test_a_plain_vllm_that_was_started_otherwise_is_told_the_flag_it_lacks(wrong, apply, words):
    require_fitting_start(engine_client(), "merged")
    require_fitting_start(engine_client(**TWO_ENGINES), "merged")
    require_fitting_start(engine_client(is_moe=True), "merged")
    require_fitting_start(engine_client(lora_config="some", quantization="awq"), "adapter")
    with pytest.raises(UnsupportedError, match=words):
        require_fitting_start(engine_client(**wrong), apply)


def test_an_untested_vllm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("weightferry.rollout_server.engine.version", lambda _distribution: "0.31.0")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.31\.0 is installed; .* 0\.32\.x, 0\.33\.x"):
        require_tested_version()


@pytest.mark.parametrize("apply", ["merged", "adapter"])
@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ({}, False),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, False),
        ({"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}, False),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, True),
        # clears those of its connectors that can
        ({"kv_connector": "MultiConnector", "kv_role": "kv_both"}, True),
        # clears what is in memory, and leaves what is on disk
        (
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec"},
            },
            True,
        ),
        (
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "users.own",
            },
            True,
        ),
    ],
)
def test_a_cache_that_keeps_what_old_weights_made_is_refused(flags, is_refused, apply):
    from vllm.config import KVTransferConfig

    client = engine_client(kv_transfer_config=KVTransferConfig(**flags), lora_config="some")
    if not is_refused:
        require_fitting_start(client, apply)
        return
    with pytest.raises(
        UnsupportedError, match=f"{flags['kv_connector']} .* keys and values of older weights"
    ):
        require_fitting_start(client, apply)
