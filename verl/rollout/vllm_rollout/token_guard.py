"""Refuses requests without the token of a run, on every path of vLLM's HTTP server; named by `--middleware`."""

import hmac
import os
from typing import Any

from starlette.responses import JSONResponse

VARIABLE = "VERL_SERVER_TOKEN"  # of the server's environment: command lines can be read by all users
OPEN = ("/health",)


class TokenGuard:
    """Passes on requests with the header `Authorization: Bearer <token>`, and those to /health.

    vLLM's own --api-key guards the paths below /v1 only: not /classify, /pause or /metrics.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.wanted = app, f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN:
            given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
            if not hmac.compare_digest(given, self.wanted):
                if scope["type"] == "websocket":
                    return await send({"type": "websocket.close", "code": 1008})
                text = "the header Authorization: Bearer <token> of this run is missing or wrong"
                return await JSONResponse({"error": text}, 401)(scope, receive, send)
        await self.app(scope, receive, send)
