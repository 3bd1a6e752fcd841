"""Requests that weight syncs interrupt, and that continue with the new weights."""

from collections.abc import Callable
from typing import Any

from verl.agents.agent_loop.server_manager import AsyncLLMServerManager, seed_of
from verl.agents.agent_loop.worker import AgentLoopWorker
from verl.rollout.replica import TokenOutput


class InterruptibleServerManager(AsyncLLMServerManager):
    """Continues a turn that a server aborted: with all tokens so far, and with what is left of its budget.

    A loop gets one answer with the tokens of all parts and, as its weights version, that of the first part. Seeds of
    the parts differ, since an engine would begin again with the random numbers of the first part.

    Attributes:
        spans: (weights version, tokens) of each part, for the request ids that have a list here.
        on_interrupted: called with the request id and the tokens of the turn so far.
        on_server: called with a server's number and 1 before a request to it, and -1 after it.
    """

    on_interrupted: Callable[[str, int], None] = staticmethod(lambda request_id, tokens: None)
    on_server: Callable[[int, int], None] = staticmethod(lambda server, change: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spans: dict[str, list[tuple[int, int]]] = {}

    async def send_turn(
        self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any], log_probs: bool
    ) -> TokenOutput:
        whole: TokenOutput | None = None
        while True:
            before = [] if whole is None else whole.token_ids
            part = await super().send_turn(request_id, prompt_ids + before, rest_of(sampling, len(before)), log_probs)
            if part.token_ids and request_id in self.spans:
                self.spans[request_id].append((part.weights_version or 0, len(part.token_ids)))
            whole = part if whole is None else _joined(whole, part)
            if part.stop_reason != "aborted":
                return whole
            if len(whole.token_ids) >= sampling["max_tokens"]:
                return whole.model_copy(update={"stop_reason": "length"})
            self.on_interrupted(request_id, len(whole.token_ids))

    async def _ask(self, server: int, prompt_ids: list[int], sampling: dict[str, Any], log_probs: bool) -> TokenOutput:
        self.on_server(server, 1)
        try:
            return await super()._ask(server, prompt_ids, sampling, log_probs)
        finally:
            self.on_server(server, -1)


class InterruptibleWorker(AgentLoopWorker):
    """Runs conversations whose generations weight syncs interrupt."""

    server_manager_class = InterruptibleServerManager


def rest_of(sampling: dict[str, Any], done: int) -> dict[str, Any]:
    """The sampling parameters for the rest of a turn of which `done` tokens were generated."""
    if not done:
        return sampling
    rest = {**sampling, "max_tokens": sampling["max_tokens"] - done}
    if rest.get("min_tokens"):
        rest["min_tokens"] = max(0, rest["min_tokens"] - done)
    if rest.get("seed") is not None:
        rest["seed"] = seed_of(f"{rest['seed']}+{done}".encode())
    return rest


def _joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    values: dict[str, Any] = {"token_ids": first.token_ids + second.token_ids, "stop_reason": second.stop_reason}
    for name in ("log_probs", "kept_tokens"):
        one, other = getattr(first, name), getattr(second, name)
        values[name] = None if one is None or other is None else one + other
    return first.model_copy(update=values)
