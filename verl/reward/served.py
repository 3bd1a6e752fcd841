"""Reward models that are served: one address for all of them, and the score of a discriminative one."""

import asyncio
import threading
from typing import Any

from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout, web

from verl.config.reward_model import RewardModelConfig
from verl.data.chat_template import render_chat
from verl.protocol import DataProto
from verl.reward.managers.base import SampleRewardManager
from verl.reward.pool import Failure
from verl.reward.rows import RewardError, rows_of
from verl.utils.http_json import post_json

REQUEST_TIMEOUT_S = 600.0
_SIZE_LIMIT = 64 << 20


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
        self._router = RequestProxy({handle.address: handle.token for handle in handles})

    def get_router_address(self) -> str:
        """host:port that answers every request of the servers' API."""
        return self._router.address

    def close(self) -> None:
        """End router and servers."""
        self._router.close()
        self.worker_group.close_rollout()


class RequestProxy:
    """Forwards HTTP requests to the least busy of several servers, from a thread of this process.

    `tokens` has the bearer token of each server by its address ("host:port").
    """

    def __init__(self, tokens: dict[str, str]) -> None:
        self.in_flight = dict.fromkeys(tokens, 0)
        self._tokens = tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="reward-router")
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> str:
        self._session = ClientSession(timeout=ClientTimeout(total=REQUEST_TIMEOUT_S), trust_env=False)
        app = web.Application(client_max_size=_SIZE_LIMIT)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        body, problem = await request.read(), ""
        for address in sorted(self.in_flight, key=self.in_flight.__getitem__):
            self.in_flight[address] += 1
            try:
                url = f"http://{address}{request.rel_url}"
                headers = {"Content-Type": request.content_type, "Authorization": f"Bearer {self._tokens[address]}"}
                async with self._session.request(request.method, url, data=body, headers=headers) as reply:
                    answer = await reply.read()
                    return web.Response(status=reply.status, body=answer, content_type=reply.content_type)
            except (ClientError, TimeoutError) as error:
                problem = f"{address}: {type(error).__name__}: {error}"
                # A server that refuses connections is always the least busy one, so the next one is asked.
                if not isinstance(error, ClientConnectionError):
                    break
            finally:
                self.in_flight[address] -= 1
        return web.Response(status=502, text=problem)

    def close(self) -> None:
        """Stop listening."""

        async def end() -> None:
            await self._runner.cleanup()
            await self._session.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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
            raise ValueError("reward_model.enable=true needs the address of a server with the reward model.")
        self.tokenizer, self.settings, self.reward_fn_key = tokenizer, settings, reward_fn_key
        self.url, self.reward_model_tokenizer = f"http://{reward_router_address}/classify", reward_model_tokenizer

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score", "reward_extra_info"} of a batch with one row and its column raw_prompt."""
        (row,) = rows_of(data, self.reward_fn_key)
        answer = self.tokenizer.decode(row.response_ids, skip_special_tokens=True)
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
