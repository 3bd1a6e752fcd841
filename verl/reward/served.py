"""Reward models that are served: one address for all of them, and the score of a discriminative one."""

from typing import Any

from verl.config.reward_model import RewardModelConfig
from verl.data.chat_template import render_chat
from verl.protocol import DataProto
from verl.reward.managers.base import SampleRewardManager
from verl.reward.pool import Failure
from verl.reward.rows import RewardError, judged_text, rows_of
from verl.utils.http_json import post_json
from verl.utils.request_router import RequestProxy

REQUEST_TIMEOUT_S = 600.0


class RewardModelManager:
    """One address, on this machine, for the servers of a reward model.

    It is that of a router in this process, which sends each request to the server with the fewest in flight, with the
    token of that server.

    Args:
        config: the section reward_model.
        worker_group: the ranks of RewardServerWorker.
    """

    def __init__(self, config: RewardModelConfig, worker_group: Any) -> None:
        self.config, self.worker_group = config, worker_group
        handles = [handle for handle in worker_group.server_handle() if handle is not None]
        self.server_addresses = [handle.address for handle in handles]
        self._router = RequestProxy({handle.address: handle.token for handle in handles}, REQUEST_TIMEOUT_S)

    def get_router_address(self) -> str:
        """host:port that answers every request of the servers' API."""
        return self._router.address

    def close(self) -> None:
        """End router and servers."""
        self._router.close()
        self.worker_group.close_rollout()


class ServedRewardManager(SampleRewardManager):
    """The score that a served discriminative reward model gives a chat, whose last turn is the answer.

    Asks POST /classify, which vLLM and SGLang answer in the same form for models with one label; a chat that is too
    long loses its beginning. The extra acc is the score.
    """

    def __init__(
        self, tokenizer: Any, settings: RewardModelConfig, reward_router_address: str | None,
        reward_model_tokenizer: Any, reward_fn_key: str,
    ) -> None:  # fmt: skip
        if reward_router_address is None:
            what = "reward_model.enable=true needs the address of a server with the reward model"
            raise ValueError(f"{what}: pass reward_router_address='host:port'.")
        self.tokenizer, self.settings, self.reward_fn_key = tokenizer, settings, reward_fn_key
        self.url, self.reward_model_tokenizer = f"http://{reward_router_address}/classify", reward_model_tokenizer

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score", "reward_extra_info"} of a batch with one row and its column raw_prompt."""
        (row,) = rows_of(data, self.reward_fn_key)
        answer = judged_text(self.settings, self.tokenizer, row.response_ids, row.response_mask)
        chat = [*data.non_tensor_batch["raw_prompt"][0], {"role": "assistant", "content": answer}]
        body = {
            "model": self.settings.model.path, "input": render_chat(self.reward_model_tokenizer, chat),
            "use_activation": False, "truncate_prompt_tokens": -1, "add_special_tokens": False,
        }  # fmt: skip
        try:
            reply = await post_json(self.url, body, REQUEST_TIMEOUT_S)
            score = float(reply["data"][-1]["probs"][-1])
        except Exception as error:
            failure = Failure("error", f"asked {self.url}: {type(error).__name__}: {error}")
            raise RewardError(f"{row}: {self.url}: {type(error).__name__}: {error}", failure) from error
        return {"reward_score": score, "reward_extra_info": {"acc": score}}
