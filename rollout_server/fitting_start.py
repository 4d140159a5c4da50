"""Whether vLLM was started so that versions can be applied rightly: what its flags alone tell.

Reads vLLM's configuration and touches nothing; that reloads are right is for self_check.py.
"""

from __future__ import annotations

from typing import Any

from ..shared.errors import UnsupportedError
from .engine import ASK_ALL_ENGINES, WORKER_EXTENSION, is_on_cpu

# Keep keys and values in this server's memory, and are cleared by a pause (vllm 0.32).
CLEARED_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
CLEARED_SPEC = "CPUOffloadingSpec"


def require_fitting_start(client: Any, apply: str) -> None:
    """UnsupportedError unless vLLM (its EngineClient) was started so that this apply mode is right."""
    _require_one_front(client)
    config = client.vllm_config
    if config.parallel_config.worker_extension_cls != WORKER_EXTENSION:
        raise UnsupportedError(f"start vLLM with --worker-extension-cls {WORKER_EXTENSION}")
    if is_on_cpu() and not config.model_config.enforce_eager:
        raise UnsupportedError(
            "start vLLM with --enforce-eager: on CPU, compiled graphs keep the weights of their first run"
        )
    if apply == "adapter" and config.lora_config is None:
        raise UnsupportedError("start vLLM with --enable-lora, or serve with --apply merged or fold")
    if apply != "adapter" and config.model_config.quantization is not None:
        raise UnsupportedError(
            f"the base is quantised ({config.model_config.quantization}): merged weights cannot replace its "
            "own; serve with --apply adapter"
        )
    _require_caches_that_clear(config.kv_transfer_config)
    if config.ec_transfer_config is not None:
        raise UnsupportedError(
            "what older weights made of images is kept outside vLLM: start it without --ec-transfer-config"
        )


def _require_caches_that_clear(transfer: Any) -> None:
    """Keys and values of older weights must be kept nowhere.

    A pause asks vLLM's KV connector to clear them, and one that cannot is taken for one that did; storage
    behind a cache is left as it is (vllm 0.32, v1/core/sched/scheduler.py `reset_connector_cache`, v1/
    kv_offload/tiering/manager.py `reset_cache`). By an adapter's name alone they may be another run's.
    """
    if transfer is None or transfer.kv_connector is None:
        return
    name = transfer.kv_connector
    spec = transfer.kv_connector_extra_config.get("spec_name", CLEARED_SPEC)
    if name not in CLEARED_CONNECTORS or transfer.kv_connector_module_path or spec != CLEARED_SPEC:
        raise UnsupportedError(
            f"the KV connector {name} (spec {spec}) may keep keys and values of older weights: start vLLM "
            "without --kv-transfer-config; --kv-offloading-size with its native backend is cleared"
        )


def _require_one_front(client: Any) -> None:
    """This API server must be the only one that pauses, and see every engine; all engines read one cache."""
    parallel = client.vllm_config.parallel_config
    if parallel._api_process_count != 1:
        raise UnsupportedError(
            "several API server processes would pause against each other: start vLLM with "
            "--api-server-count 1, and as many servers as you like"
        )
    num_local, num_engines = parallel.data_parallel_size_local, parallel.data_parallel_size
    if num_engines == 1:
        return
    is_split = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    if is_split or num_local != num_engines or parallel.data_parallel_backend != "mp":
        raise UnsupportedError(
            f"not all of the {num_engines} data-parallel engines are on this host and behind this server "
            "alone: start vLLM with --data-parallel-backend mp and without external or hybrid load "
            "balancing, or one server a host, all on one exchange"
        )
    # engines of a mixture of experts step together, which vLLM 0.32 cannot do on CPU: that was never run
    if client.vllm_config.model_config.is_moe or not hasattr(client.engine_core, ASK_ALL_ENGINES):
        raise UnsupportedError(
            "data parallelism is tested with dense models and vLLM 0.32 alone: start one server for each "
            "engine, all on one exchange"
        )
