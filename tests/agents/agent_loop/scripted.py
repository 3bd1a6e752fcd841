"""An engine whose answers are written down, in place of AsyncLLMServerManager."""

import asyncio

from verl.rollout.replica import TokenOutput


class ScriptedEngine:
    """Answers `answer(request_id, prompt_ids, sampling_params)`, a TokenOutput or ids, which may be a coroutine's."""

    def __init__(self, rollout_config, answer):
        self.rollout_config, self.answer = rollout_config, answer
        self.seen, self.wrote, self.log_probs = [], [], []
        self.prompt_tokens = self.cached_tokens = 0
        self.versions = set()

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.seen.append(list(prompt_ids))
        answer = self.answer(request_id, prompt_ids, sampling_params)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if isinstance(answer, TokenOutput):
            return answer
        ids = answer[: sampling_params["max_tokens"]]
        self.wrote.append(ids)
        self.log_probs.append([-(1.0 + i + len(self.seen)) for i in range(len(ids))])
        self.versions.add(3)
        full = len(ids) == sampling_params["max_tokens"]
        return TokenOutput(token_ids=ids, log_probs=self.log_probs[-1], stop_reason="length" if full else "completed",
                           weights_version=3)  # fmt: skip

    async def close(self):
        pass
