"""The tool that asks a retrieval service over HTTP."""

from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.execution_pool import ExecutionWorker as SearchExecutionWorker
from verl.agents.tools.execution_pool import PoolMode, TokenBucketWorker
from verl.agents.tools.execution_pool import init_execution_pool as init_search_execution_pool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.http_json import ServiceError, post_json

# The names that verl's module has, too.
__all__ = ["PoolMode", "SearchExecutionWorker", "SearchTool", "TokenBucketWorker", "init_search_execution_pool"]

DEFAULTS = {"topk": 3, "timeout": 30, "num_workers": 120, "rate_limit": 120, "enable_global_rate_limit": True}
SEARCH_PARAMETERS = {
    "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Texts to search for."}},
    "required": ["query_list"],
}


class SearchTool(BaseTool):
    """Asks `config["retrieval_service_url"]` for the passages nearest to each text of the argument `query_list`.

    The service gets POST {"queries", "topk", "return_scores": true} and answers {"result": one list a query of
    {"document": {"contents": "title, newline, text"}, "score"}}. Further keys of `config`, with DEFAULTS:
    num_workers requests of this tool and rate_limit of all processes at once, enable_global_rate_limit, timeout in
    seconds, topk.
    """

    parallel_calls = True
    default_schema = OpenAIFunctionToolSchema.of(
        "search", "Search for passages on each of several texts.", SEARCH_PARAMETERS
    )

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self.retrieval_service_url = config.get("retrieval_service_url")
        if not self.retrieval_service_url:
            raise ValueError("config.retrieval_service_url is empty; set the URL of the retrieval service")
        settings = DEFAULTS | config
        self.topk, self.timeout = settings["topk"], settings["timeout"]
        self.execution_pool = init_search_execution_pool(
            settings["num_workers"], settings["enable_global_rate_limit"], settings["rate_limit"],
            name="search-rate-limiter",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """The passages as text; ServiceError where the service refuses or answers in another format."""
        text, metrics = await self.execution_pool.execute(
            self.execute_search, instance_id, parameters["query_list"], self.retrieval_service_url, self.topk,
            self.timeout,
        )  # fmt: skip
        return ToolResponse(text=text), 0.0, metrics

    async def execute_search(
        self, instance_id: str, query_list: list, retrieval_service_url: str, topk: int, timeout: int
    ) -> tuple[str, dict]:
        """(passages as text, {"query_count", "total_results"}), with verl's arguments: a subclass may override it."""
        body = {"queries": query_list, "topk": topk, "return_scores": True}
        reply = await post_json(retrieval_service_url, body, timeout)
        try:
            results = [[hit["document"]["contents"].partition("\n") for hit in hits] for hits in reply["result"]]
        except (AttributeError, KeyError, TypeError) as error:
            raise ServiceError(f"{retrieval_service_url} answered in another format: {str(reply)[:200]}") from error
        metrics = {"query_count": len(query_list), "total_results": sum(map(len, results))}
        return "\n---\n".join(map(_shown, results)) or "No results.", metrics  # "or": without queries


def _shown(passages: list[tuple[str, str, str]]) -> str:
    """The numbered passages of a query, each (title, newline, text)."""
    blocks = [f"Doc {number} (Title: {title})\n{text}" for number, (title, _, text) in enumerate(passages, start=1)]
    return "\n\n".join(blocks) or "No results."
