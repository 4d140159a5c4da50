"""A user's middleware, for tests: answers one path with every route of the running app, hidden or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse

PATH = "/every-route"
MIDDLEWARE = "route_lister.RouteLister"


class RouteLister:
    """To be given with --middleware; its module must be on PYTHONPATH."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != PATH:
            await self._app(scope, receive, send)
            return
        found = sorted(set(_walk(scope["app"].routes)))
        await JSONResponse(found)(scope, receive, send)


def _walk(routes: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of each; a mount is "*", as it takes all methods and what is below its path."""
    for route in routes:
        path = prefix + getattr(route, "path", "")
        methods = getattr(route, "methods", None)
        if methods is not None:
            yield from ((method, path) for method in methods)
        elif below := getattr(route, "routes", None):
            yield from _walk(below, path)
        else:
            yield "*", path
