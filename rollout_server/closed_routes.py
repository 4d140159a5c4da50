"""vLLM's own routes that change what answers, and how each is kept closed.

vLLM's development routes replace weights, clear caches and call worker methods for anybody, also where
--api-key is set (vllm 0.32, entrypoints/serve/middleware/authenticate.py); its LoRA routes load any local
directory. All of them stand behind environment variables, and a server with one of these does not start.
One more is always there, and is replaced: an endpoint plug-in's route stands in for vLLM's (vllm 0.32,
plugins/endpoint_plugins/interface.py). tests/test_control_surface.py lists every route of a running server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..shared.errors import UnsupportedError

OPENING_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "vLLM's development routes, which change weights and caches",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "vLLM's routes that load and unload adapters",
    # made after their request has ended, or read back later: under the number of another version
    "VLLM_ENABLE_RESPONSES_API_STORE": "vLLM's store of responses, which name no version",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "vLLM's base to requests for any unknown model",
}
REPLACED_PATH = "/scale_elastic_ep"


def require_closed(environment: Mapping[str, str]) -> None:
    """UnsupportedError if a variable opens routes that act behind this server's back."""
    for name, words in OPENING_VARIABLES.items():
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            raise UnsupportedError(f"{name} opens {words}, to anybody and past every check: unset it")


def replace_routes(app: Any) -> None:
    """Close, on a FastAPI app, what vLLM mounts in every server."""
    app.add_api_route(REPLACED_PATH, _closed, methods=["POST"], response_model=None)


async def _closed() -> Any:
    from starlette.responses import JSONResponse

    message = "this route is closed: one server has one engine; start more servers on the exchange"
    return JSONResponse({"message": message}, status_code=403)
