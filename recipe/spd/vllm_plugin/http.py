"""The scorer's counts on vLLM's HTTP server; named by `--middleware`."""

from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily
from starlette.responses import JSONResponse

from recipe.spd.vllm_plugin.judge import COUNTS

PATH = "/spd/counts"
HELP = {
    "matched": "Accepted draft tokens that are the target's own.",
    "judged": "Draft tokens other than the target's own, up to the first rejection of their block.",
    "let_through": "Judged draft tokens that the scorer accepted.",
}


class CountsMiddleware:
    """Adds spd:*_tokens_total to /metrics, GET /spd/counts (totals), GET /spd/counts/ID (each request of a response).

    ID is the `id` of a completion; counts of the last finished requests are kept. /metrics shows them with one API
    server process, vLLM's default.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.totals = dict.fromkeys(COUNTS, 0)
        REGISTRY.register(self)

    def collect(self) -> list[CounterMetricFamily]:
        """For prometheus_client, which cannot await: the totals that `__call__` got before it passed a scrape on."""
        return [CounterMetricFamily(f"spd:{name}_tokens", HELP[name], self.totals[name]) for name in COUNTS]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "") if scope["type"] == "http" and scope["method"] == "GET" else ""
        if path.rstrip("/") in ("/metrics", PATH):
            self.totals = await _counts(scope, None)
        if path.rstrip("/") == PATH:
            return await JSONResponse(self.totals)(scope, receive, send)
        if path.startswith(f"{PATH}/"):
            counts = await _counts(scope, path.removeprefix(f"{PATH}/"))
            return await JSONResponse(counts, 200 if counts else 404)(scope, receive, send)
        await self.app(scope, receive, send)


async def _counts(scope: Any, response_id: str | None) -> dict[str, Any]:
    """ServedJudge.report of the last pipeline rank, which alone counts: totals, or of the requests of a response."""
    ranks = await scope["app"].state.engine_client.collective_rpc("spd_counts", args=(response_id,))
    return max(ranks, key=lambda counts: sum(counts.values()) if response_id is None else len(counts))
