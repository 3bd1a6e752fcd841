"""Workers that run many conversations at the same time."""

import asyncio
import faulthandler
import itertools
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
from loguru import logger
from omegaconf import DictConfig
from transformers import PretrainedConfig

from verl.agents.agent_loop.base import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.agents.agent_loop.registry import _agent_loop_registry, loops_in_file, make_agent_loop
from verl.agents.agent_loop.rows import batch_of, empty_output, is_lost
from verl.agents.agent_loop.server_manager import AsyncLLMServerManager, ConversationTooLong
from verl.agents.rollout_trace import RolloutTraceConfig, rollout_trace_attr
from verl.agents.tools.tool_registry import initialize_tools_from_config
from verl.data.rl_dataset import get_dataset_class
from verl.protocol import DataProto
from verl.rollout.replica import ServerHandle
from verl.single_controller.base.worker import STACK_SIGNAL
from verl.utils.fs import copy_to_local
from verl.utils.http_json import ServerUnreachable
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import policy_tokenizer

SEED = "__seed__"  # column: seed of the conversation


class AgentLoopWorker:
    """Runs the conversations of its rows, all at the same time; a plain class that `ray.remote` takes.

    Args:
        config: the trainer's configuration.
        server_handles: the rollout servers.
        reward_router_address: not used; rewards are computed by the trainer.
        router: see AsyncLLMServerManager.
    """

    server_manager_class: type[AsyncLLMServerManager] = AsyncLLMServerManager

    def __init__(
        self, config: DictConfig, server_handles: list[ServerHandle], reward_router_address: str | None = None,
        router: Any = None,
    ) -> None:  # fmt: skip
        self.config, self.reward_router_address = config, reward_router_address
        if not config.trainer.local:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        import_external_libs(config.actor_rollout_ref.model.get("external_lib"))
        self.server_manager = self.server_manager_class(config, server_handles, router=router)
        self.rollout_config = self.server_manager.rollout_config
        self.tokenizer, self.processor = policy_tokenizer(config)
        self.dataset_cls = get_dataset_class(config.data)
        turns = self.rollout_config.multi_turn
        tools = ToolListWrap(partial(initialize_tools_from_config, turns.tool_config_path, turns.function_tool_path))
        self.loop_arguments = {
            "trainer_config": DictConfigWrap(config), "tokenizer": self.tokenizer, "processor": self.processor,
            "dataset_cls": self.dataset_cls, "dataset_config": config.data, "data_config": DictConfigWrap(config.data),
            "tools": tools, "hf_model_type": model_type_of(copy_to_local(config.actor_rollout_ref.model.path)),
        }  # fmt: skip
        if path := self.rollout_config.agent.agent_loop_config_path:
            _agent_loop_registry.update(loops_in_file(path))
        self._finished: asyncio.Queue[tuple[int, DataProto] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task] = []  # the running conversations
        self._cancels_rest = self._warned_of_bias = False
        trace = self.rollout_config.trace
        if trace.backend is not None:
            RolloutTraceConfig.init(
                config.trainer.project_name, config.trainer.experiment_name, trace.backend, trace.token2text,
                trace.max_samples_per_step_per_worker, folder=f"{config.trainer.default_local_dir}/rollout_traces",
            )  # fmt: skip

    async def close(self) -> None:
        """Close the connections to the servers, and end the processes of an environment."""
        if environment := self.loop_arguments["trainer_config"].shared.get("environment"):
            environment.close()
        await self.server_manager.close()

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Run a conversation for each row; returns the rows in order, as `rows.batch_of` describes.

        Non-tensor columns are the arguments of the loops' `run`. meta_info["sampling"] has the sampling parameters,
        column __seed__ the seeds. With meta_info["report_finished"], `next_finished` returns the rows that end well,
        and only the lost ones are returned here. With meta_info["cancelled"] no conversation runs, and all rows are
        lost.
        """
        meta, columns, size = batch.meta_info, batch.non_tensor_batch, len(batch)
        index = columns.get("sample_index", np.arange(size))
        infos = await get_trajectory_info(meta.get("global_steps", -1), index.tolist(), meta.get("validate", False))
        rows = [{name: column[i] for name, column in columns.items()} for i in range(size)]
        manager, reports = self.server_manager, bool(meta.get("report_finished"))
        manager.prompt_tokens, manager.cached_tokens, manager.versions = 0, 0, set()
        self._cancels_rest = False

        async def run_row(i: int) -> AgentLoopOutput | None:
            if meta.get("cancelled"):
                return empty_output("cancelled")
            try:
                output = await self._run_agent_loop(dict(meta["sampling"]), infos[i], **rows[i])
            except asyncio.CancelledError:
                if not self._cancels_rest:
                    raise
                return empty_output("cancelled")
            if reports and not is_lost(output):
                self._finished.put_nowait((i, self._batch_of([output])))
            return output

        self._tasks = tasks = [asyncio.create_task(run_row(i)) for i in range(size)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:  # one row raised: the others' requests are aborted
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if reports:
                self._finished.put_nowait(None)
        result = self._batch_of([output for output in outputs if not reports or is_lost(output)])
        result.meta_info["prefix"] = [manager.prompt_tokens, manager.cached_tokens]
        return result

    def _batch_of(self, outputs: list[AgentLoopOutput | None]) -> DataProto:
        return batch_of(outputs, self.rollout_config, self.tokenizer.pad_token_id)

    async def cancel_rest(self) -> None:
        """End the running `generate_sequences`: conversations that have not ended are cancelled, and lost."""
        await asyncio.sleep(0)  # a task that has not begun would not see that it is cancelled by this
        self._cancels_rest = True
        for task in self._tasks:
            task.cancel()

    async def next_finished(self) -> list[tuple[int, DataProto] | None]:
        """Rows of the running `generate_sequences` that finished since the last call, at least one; None ends them.

        Each is (position in the batch, batch of one row). Lost conversations are left out. Needs
        meta_info["report_finished"].
        """
        items = [await self._finished.get()]
        while not self._finished.empty():
            items.append(self._finished.get_nowait())
        return items

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | None:
        """The conversation of one row; None if it was lost."""
        name = row.pop("agent_name", None) or self.rollout_config.agent.default_agent_loop
        if (seed := row.pop(SEED, None)) is not None:
            sampling_params["seed"] = int(seed)
        needs_kept = sampling_params.get("kept_tokens")  # loops may take entries out
        loop = make_agent_loop(name, server_manager=self.server_manager, **self.loop_arguments)
        arguments = {"request_id": uuid4().hex, "trajectory": trajectory, **row}
        try:
            with rollout_trace_attr(name="agent_loop", **trajectory):
                output = await loop.run(sampling_params, **arguments)
            if not isinstance(output, AgentLoopOutput):
                raise TypeError(
                    f"{type(loop).__name__}.run returned {type(output).__name__}; expected an AgentLoopOutput"
                )
            loop.check_prompt(output.prompt_ids)
            # A loop that does not return the versions of its turns: weights do not change within a step.
            output.extra_fields.setdefault("weights_versions", list(self.server_manager.versions))
        except (ServerUnreachable, ConversationTooLong) as error:
            logger.warning(f"conversation of sample {trajectory['sample_index']} is dropped: {error}")
            return None
        lacks_kept = needs_kept and output.kept_tokens is None and any(output.response_mask)
        if lacks_kept and not self._warned_of_bias:
            self._warned_of_bias = True
            logger.warning(
                f"agent loop {name} returns no AgentLoopOutput.kept_tokens (those of each turn's TokenOutput): "
                "rollout.top_k and rollout.top_p bias the ratios of its samples. Set rollout.top_p=1 and "
                "rollout.top_k=-1, or let the loop return them."
            )
        return output


def model_type_of(path: str) -> str | None:
    """model_type of the config.json in a model's folder, or of a name of the hub; None where there is no such file."""
    try:
        return PretrainedConfig.get_config_dict(path)[0].get("model_type")
    except OSError:
        return None


AgentLoopWorkerBase = AgentLoopWorker  # upstream's name of the class to derive from


async def get_trajectory_info(step: int, index: list[Any], validate: bool) -> list[dict[str, Any]]:
    """{step, sample_index, rollout_n, validate} of each row; rollout_n numbers equal neighbours in `index`."""
    infos = []
    for value, equal in itertools.groupby(index):
        for n, _ in enumerate(equal):
            infos.append({"step": step, "sample_index": value, "rollout_n": n, "validate": validate})
    return infos
