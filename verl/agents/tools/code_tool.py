"""The tool that runs Python programs in the local sandbox."""

from typing import Any

from verl.agents.tools.base_tool import EXAMPLES, BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.config.compose import omega_conf_to_dataclass
from verl.reward.rules.code_cases import extract_code
from verl.reward.sandbox import Outcome, SandboxConfig, run_python
from verl.utils.threads import in_thread

CODE_PARAMETERS = {
    "properties": {"code": {"type": "string", "description": "The program. Only what it prints is returned."}},
    "required": ["code"],
}


class _Limits(SandboxConfig, section="config"):
    """Limits in the `config` of a tool: errors name its keys, not those of reward_model.sandbox."""


class CodeTool(BaseTool):
    """Runs the argument `code` as a Python program of its own, with the standard library, and answers what it printed.

    `config` takes the settings of `reward_model.sandbox` (seconds, memory_mb, disk_mb, output_kb, threads, unconfined).
    Nothing is kept between calls. Output beyond `output_kb` ends the program while it is being read.
    """

    parallel_calls = True
    default_schema = OpenAIFunctionToolSchema.of(
        "code_interpreter", "Run a Python program and return what it prints.", CODE_PARAMETERS
    )

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        own = {key: value for key, value in config.items() if key not in ("type", *EXAMPLES)}
        self._limits = omega_conf_to_dataclass(own, _Limits)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Run the program; a fence around it is removed. SandboxUnavailable where this machine cannot confine it."""
        code = parameters["code"]
        ran = await in_thread(run_python, extract_code(code) or code, b"", self._limits)
        return ToolResponse(text=_shown(ran, self._limits)), 0.0, {"seconds": ran.seconds, "ok": ran.ok}


def _shown(ran: Outcome, limits: SandboxConfig) -> str:
    parts = [ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace")]
    if ran.stopped == "time":
        parts.append(f"The program was stopped after {limits.seconds:g} s.")
    elif ran.stopped == "output":
        parts.append(f"The program was stopped: it printed more than {limits.output_kb} KiB.")
    elif ran.exit_code != 0:
        parts.append(f"The program ended with exit code {ran.exit_code}.")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "The program printed nothing."
