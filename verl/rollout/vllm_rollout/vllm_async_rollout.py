"""The rollout of mode async: the engine of vLLMRollout, served over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.device_mesh import DeviceMesh

from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.base import engine_group, register_rollout
from verl.rollout.replica import ServerHandle, host_to_bind
from verl.rollout.vllm_rollout.engine_over_ranks import WAIT, CollectiveRollout, FollowingEngine, LeadingEngine
from verl.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.rollout.vllm_rollout.vllm_rollout import vLLMRollout


@register_rollout("vllm", "async")
class vLLMAsyncRollout(vLLMRollout):  # noqa: N801
    """The engine of vLLMRollout, served over HTTP; all use of the engine happens in the server's thread.

    Of an engine over several ranks (tensor_model_parallel_size above 1) the first rank has the server.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh | None) -> None:
        self.server: vLLMHttpServer | None = None
        self.leading: LeadingEngine | None = None
        self.following: FollowingEngine | None = None
        super().__init__(config, model_config, device_mesh)
        self.is_awake = not self.can_sleep  # afterwards set in the engine's thread
        model = self.llm.llm_engine.model_config
        device = torch.cuda.current_device() if self.on_cuda else None
        engine, rollout = self.llm.llm_engine, self  # as the server uses them
        if self.tp_group is not None:
            group = engine_group(config.tensor_model_parallel_size, WAIT)
            if dist.get_rank(group) > 0:
                self.following = FollowingEngine(engine, self, group, device)
                return
            engine = self.leading = LeadingEngine(engine, group)
            rollout = CollectiveRollout(self, engine)
        self.server = vLLMHttpServer(
            engine, rollout, vocab_size=model.get_vocab_size(), max_model_len=model.max_model_len,
            host=host_to_bind(), device=device, open_metrics=config.prometheus.enable,
        )  # fmt: skip
        logger.debug(f"vLLM serves at {self.server.address}")

    @property
    def server_handle(self) -> ServerHandle | None:
        return self.server and ServerHandle(self.server.address, self.server.token)

    def _call(self, function: Callable[..., Any], *args: Any, prepare: Callable[[], Any] | None = None) -> Any:
        """The result of a function in the engine's thread, of every rank of the engine at once.

        The rank with the server calls `prepare` first; no rank calls the function if that raises RuntimeError.
        """
        if self.following is not None:
            return self.following.call(function, *args)

        def on_all_ranks() -> Any:
            try:
                if prepare is not None:
                    prepare()
            except RuntimeError as error:
                if self.leading is not None:
                    self.leading.send("refuse", str(error))
                raise
            if self.leading is not None:
                self.leading.send("run")
            return function(*args)

        return self.server.call(on_all_ranks)

    def _run_while_idle(self, function: Callable[..., Any], *args: Any) -> Any:
        """`_call`, but RuntimeError while requests run; those that are held may start afterwards."""
        try:
            return self._call(function, *args, prepare=lambda: self.server.check_idle(function.__name__))
        finally:
            if self.server is not None:
                self.server.call(self.server._add_held)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], peft_config: Any = None, **kwargs: Any
    ) -> None:
        self._run_while_idle(super().update_weights, weights, peft_config)

    def resume(self, tags: list[str]) -> None:
        if self.server is not None:
            self.server.weight_version = str(self.weights_version)
        self._call(self.wake, tags)

    def release(self) -> None:
        if self.server is None and self.following is None:  # at the start
            return self.free()
        self._call(self.free, prepare=lambda: self.server._abort_all())

    def wake(self, tags: list[str]) -> None:
        """`resume` in the engine's thread."""
        super().resume(tags)
        self.is_awake |= "kv_cache" in tags
        if self.server is not None:
            self.server._add_held()

    def free(self) -> None:
        """`release` in the engine's thread."""
        super().release()
        self.is_awake = False

    def read_weights(self, path: str) -> None:
        """Take the weights of a model folder."""
        self._run_while_idle(self.load_from_disk, path)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return self._run_while_idle(super().generate_sequences, prompts)

    def close(self) -> None:
        if self.leading is not None:
            self.server.call(self.server._abort_all)
            self.server.call(self.leading.send, "close")
        if self.server is not None:
            self.server.close()
        if self.following is not None:
            self.following.close()
        super().close()
