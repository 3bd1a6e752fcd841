"""The tool that runs programs at a service of the SandboxFusion protocol."""

from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.code_tool import CODE_PARAMETERS
from verl.agents.tools.execution_pool import ExecutionWorker, PoolMode, TokenBucketWorker, init_execution_pool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.http_json import ServiceError, post_json

__all__ = ["ExecutionWorker", "PoolMode", "SandboxFusionTool", "TokenBucketWorker", "init_execution_pool"]

DEFAULTS = {
    "default_timeout": 30, "default_language": "python", "memory_limit_mb": 1024, "num_workers": 10, "rate_limit": 10,
    "enable_global_rate_limit": True,
}  # fmt: skip


class SandboxFusionTool(BaseTool):
    """Runs the argument `code` at the service `config["sandbox_fusion_url"]` and answers what the program printed.

    Further keys of `config`: num_workers (10) requests of this process and rate_limit (10) of all processes at once,
    enable_global_rate_limit (true), default_timeout (30 s), default_language (python), memory_limit_mb (1024). The
    optional arguments `timeout` and `language` take the place of the defaults where the schema has them.
    """

    parallel_calls = True
    default_schema = OpenAIFunctionToolSchema.of(
        "code_interpreter", "Run a program and return what it prints.", CODE_PARAMETERS
    )

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self.sandbox_fusion_url = config.get("sandbox_fusion_url")
        if not self.sandbox_fusion_url:
            raise ValueError("config.sandbox_fusion_url is empty; set the service's URL, such as http://host:8080/run_code")
        settings = DEFAULTS | config
        self.default_timeout, self.default_language = settings["default_timeout"], settings["default_language"]
        self.memory_limit_mb = settings["memory_limit_mb"]
        self.execution_pool = init_execution_pool(
            settings["num_workers"], settings["enable_global_rate_limit"], settings["rate_limit"],
            name="sandbox-fusion-rate-limiter",
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run the program; ServiceError where the service gives no verdict."""
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        text = await self.execution_pool.execute(
            self.execute_code, instance_id, str(parameters["code"]), timeout, language
        )
        return ToolResponse(text=text), 0.0, {}

    async def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """What compiler and program printed."""
        request = {
            "code": code, "stdin": "", "language": language, "files": {}, "compile_timeout": timeout,
            "run_timeout": timeout, "memory_limit_MB": self.memory_limit_mb,
        }  # fmt: skip
        reply = await post_json(self.sandbox_fusion_url, request, 2 * timeout + 30)  # it may wait in a queue there
        if not isinstance(reply, dict) or reply.get("status") in (None, "SandboxError"):
            raise ServiceError(f"{self.sandbox_fusion_url} gave no verdict: {str(reply)[:200]}")
        compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
        parts = [compiled.get("stderr"), ran.get("stdout"), ran.get("stderr")]
        if ran.get("status") == "TimeLimitExceeded":
            parts.append(f"The program was stopped after {timeout:g} s.")
        return "\n".join(part.rstrip("\n") for part in parts if part) or "The program printed nothing."
