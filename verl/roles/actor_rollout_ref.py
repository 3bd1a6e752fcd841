"""One rank of the hybrid engine: actor, rollout and reference policy in one process."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger

from verl.config.actor import FSDPActorConfig, FSDPRefConfig
from verl.config.compose import to_settings
from verl.config.model import HFModelConfig
from verl.config.ppo import ActorRolloutRefConfig
from verl.config.profiler import ProfilerConfig
from verl.config.rollout import RolloutConfig
from verl.models.loading import torch_dtype_of
from verl.profiling.performance import peak_memory
from verl.profiling.profile import DistProfiler
from verl.protocol import DataProto
from verl.roles.ranks import ModelWorker, per_rank_sizes
from verl.rollout.base import get_rollout_class
from verl.single_controller.base.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.training.actor.dp_actor import DataParallelPPOActor
from verl.training.policy import Policy, get_policy
from verl.utils.threads import run_if_coroutine
from verl.utils.user_code import defined_at, kind

ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")
SAMPLES = ("attention_mask", "input_ids", "position_ids", "prompts", "responses")  # what every rollout returns


class ActorRolloutRefWorker(ModelWorker):
    """Holds the parts that `role` names: "actor", "rollout", "ref", or several of them joined by an underscore.

    For subclasses, `init_model` sets upstream's attributes: `actor`, `actor_module_fsdp`, `actor_optimizer`,
    `actor_lr_scheduler`, `rollout`, `ref_policy` and `ref_module_fsdp`, each if the role has that part.

    The rollout always generates with the actor's newest weights. `weights_version` is the global step of the last
    update in them (0: as loaded); every generated row carries it, and a rollout that holds another version is refused.
    """

    config_type = ActorRolloutRefConfig

    def __init__(
        self, config: Any, role: str, device_name: str | None = None, peak_tflops: float | None = None, **kwargs
    ) -> None:
        config = to_settings(config, ActorRolloutRefConfig)
        super().__init__(config, device_name, config.nccl_timeout, peak_tflops)
        if role not in ROLES:
            raise ValueError(f"role={role!r} is unknown. Known: {', '.join(ROLES)}.")
        self.role = role
        self._is_rollout = "rollout" in role
        self._is_actor = "actor" in role or self._is_rollout  # a rollout takes the weights of the actor in its process
        self._is_ref = "ref" in role
        self.weights_version = 0
        self.rollout_version: int | None = None
        self.rollout_is_awake = False

    @staticmethod
    def profiler_config(section: ActorRolloutRefConfig) -> ProfilerConfig:
        """The joined settings of the parts with profiler.enable=true, which share this process."""
        parts = [ModelWorker.profiler_config(part) for part in (section.actor, section.rollout, section.ref)]
        enabled = [part for part in parts if part.enable]
        return functools.reduce(ProfilerConfig.union, enabled) if enabled else ProfilerConfig()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Join the process group, then build what the role asks for."""
        self.join_ranks("actor", "rollout", "ref")
        self.model_config = self.config.model.load()
        self.actor_config = config = per_rank_sizes(
            self.config.actor, "actor_rollout_ref.actor", self.config.rollout.n, self.world_size
        )
        if self._is_actor:
            self.policy = self._make_policy(config)
            self.engine = self.make_engine(
                "actor_rollout_ref.actor", self.model_config, config.fsdp_config, config.optim, config.checkpoint
            )
            self.actor = DataParallelPPOActor(config, self.engine, self.policy)
            self.actor_module_fsdp, self.actor_optimizer = self.engine.module, self.engine.optimizer
            self.actor_lr_scheduler = self.engine.lr_scheduler
        if self._is_rollout:
            rollout_class = get_rollout_class(self.config.rollout.name, self.config.rollout.mode)
            self.rollout = rollout_class(self.config.rollout, self.model_config, self.engine.mesh)
            self.rollout.bind_actor(self.engine, self.policy)
        if self._is_ref and not self._ref_in_actor:
            model, engine_config = self._reference_model(self.config.ref), self.config.ref.fsdp_config
            self.ref_engine = self.make_engine("actor_rollout_ref.ref", model, engine_config)
            self.ref_policy = DataParallelPPOActor(config, self.ref_engine, self._make_policy(self.config.ref))
            self.ref_module_fsdp = self.ref_engine.module

    @property
    def _ref_in_actor(self) -> bool:
        return self._is_actor and self.engine.has_adapters and self.config.ref.model_path is None

    def _reference_model(self, config: FSDPRefConfig) -> HFModelConfig:
        """The model of ref.model_path, without adapters, else the actor's; ValueError if the vocabularies differ."""
        if config.model_path is None:
            return self.model_config
        shared = ("use_shm", "trust_remote_code", "override_config", "use_remove_padding")
        model = HFModelConfig(path=config.model_path, **{name: self.config.model[name] for name in shared}).load()
        own, other = self.model_config.tokenizer.get_vocab(), model.tokenizer.get_vocab()
        if own != other:
            token, _ = min(own.items() ^ other.items())
            raise ValueError(
                f"actor_rollout_ref.ref.model_path={config.model_path} has another vocabulary than "
                f"actor_rollout_ref.model.path={self.model_config.path} (they differ at the token {token!r}), so that "
                "log-probs of the same ids cannot be compared. Use a model with the same tokenizer."
            )
        return model

    def _make_policy(self, role: FSDPActorConfig | FSDPRefConfig) -> Policy:
        policy = get_policy(self.model_config.policy.name, **self.model_config.policy.kwargs)
        policy.compiled = role.use_torch_compile or role.fsdp_config.use_torch_compile
        share_prompt = self.actor_config.share_prompt_forward
        policy.set_forward(remove_padding=self.model_config.use_remove_padding, share_prompt=share_prompt)
        return policy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> bool:
        """Wake the rollout for any number of `generate_sequences`; whether the actor's weights had to be sent.

        They are not sent if the rollout holds this version of them. The actor's own weights are on the device only
        while they are sent.
        """
        run_if_coroutine(self.rollout.resume(["weights"]))
        outdated = self.rollout_version != self.weights_version
        if outdated:
            with self.engine.eval_mode():
                if self.rollout.takes_adapters and self.engine.has_adapters:
                    adapter_config, tensors = self.engine.get_adapter(check_finite=True)
                    run_if_coroutine(self.rollout.update_weights(iter(tensors.items()), peft_config=adapter_config))
                else:
                    run_if_coroutine(self.rollout.update_weights(self._weights_for_rollout()))
            self.rollout_version = self.rollout.weights_version = self.weights_version
        run_if_coroutine(self.rollout.resume(["kv_cache"]))
        self.rollout_is_awake = True
        return outdated

    def _weights_for_rollout(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's weights in the rollout's type; raises FloatingPointError at a NaN or infinite one."""
        config = self.config.rollout
        dtype = None if config.dtype == "auto" else torch_dtype_of(config.dtype, "actor_rollout_ref.rollout.dtype")
        bucket = config.update_weights_bucket_megabytes << 20
        return self.engine.get_per_tensor_param(dtype, bucket, check_finite=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Put the rollout to sleep: it frees its memory, and its weights unless it keeps them."""
        self.rollout_is_awake = False
        run_if_coroutine(self.rollout.release())
        if not self.rollout.keeps_weights:
            self.rollout_version = None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    @DistProfiler.annotate()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """meta_info["n"] samples of each prompt [B, P] -> [B * n, P + R], with column weights_version.

        Outside of `rollout_mode` ... `trainer_mode` the rollout is woken for this call alone.
        """
        called_alone = not self.rollout_is_awake
        if called_alone:
            self.rollout_mode()
        try:
            if self.rollout_version != self.weights_version:
                raise RuntimeError(
                    f"rollout '{self.config.rollout.name}' holds weights version {self.rollout_version}, the actor "
                    f"{self.weights_version}: it was not given the weights after start, wake-up, update or resume. "
                    "Call trainer_mode, then rollout_mode."
                )
            with torch.no_grad():
                output = run_if_coroutine(self.rollout.generate_sequences(prompts))
            self._check_samples(output)
            output.non_tensor_batch["weights_version"] = np.full(len(output), self.rollout_version, dtype=np.int64)
        finally:
            if called_alone:
                self.trainer_mode()
        return output.to("cpu")

    def _check_samples(self, output: Any) -> None:
        """Raise TypeError or ValueError for what a rollout of the user's own returned in place of samples."""
        place = defined_at(type(self.rollout).generate_sequences)
        if not isinstance(output, DataProto):
            raise TypeError(f"{place} returned {kind(output)}; expected a DataProto with the samples.")
        if missing := [name for name in SAMPLES if output.batch is None or name not in output.batch]:
            raise ValueError(
                f"{place} returned samples without {', '.join(missing)}; verl.rollout.sampling.build_rollout_batch "
                "makes them from the responses."
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_server(self) -> Any:
        """Where the rollout of this rank is served (rollout.mode=async); None for a rollout without a server."""
        return getattr(self.rollout, "server_handle", None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_rollout(self) -> None:
        """End what the rollout started, such as a server of its own."""
        if self._is_rollout:
            self.rollout.close()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate()
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """old_log_probs [B, R] and entropys [B, R], float32, of the actor's current weights.

        With actor.calculate_sum_pi_squared also sum_pi_squared [B, R], the sum of p^2 over each token's distribution.
        """
        self._set_forward_sizes(data, self.config.rollout)
        log_probs, entropys = self.actor.compute_log_prob(data, calculate_entropy=True)
        columns = {"old_log_probs": log_probs, "entropys": entropys}
        if self.config.actor.calculate_sum_pi_squared:
            # sum p^2 = Z(2z) / Z(z)^2 of the logits z, and the log-prob at half the temperature is 2z - log Z(2z).
            meta = {**data.meta_info, "temperature": data.meta_info["temperature"] / 2}
            sharper, _ = self.actor.compute_log_prob(DataProto(data.batch, data.non_tensor_batch, meta))
            columns["sum_pi_squared"] = (2 * log_probs - sharper).exp()
        return DataProto.from_dict(columns)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    @DistProfiler.annotate()
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """ref_log_prob [B, R]: of the reference model, or of the actor without its adapters."""
        self._set_forward_sizes(data, self.config.ref)
        if self._ref_in_actor:
            with self.engine.disable_adapter():
                log_probs, _ = self.actor.compute_log_prob(data)
        else:
            log_probs, _ = self.ref_policy.compute_log_prob(data)
        return DataProto.from_dict({"ref_log_prob": log_probs})

    def _set_forward_sizes(self, data: DataProto, section: FSDPRefConfig | RolloutConfig) -> None:
        """Micro-batch sizes of a forward-only pass: the section's own, else the update's."""
        size = section.log_prob_micro_batch_size_per_gpu
        if size is None and section.log_prob_micro_batch_size is not None:
            size = max(1, section.log_prob_micro_batch_size // self.world_size)
        data.meta_info["micro_batch_size"] = self.actor_config.ppo_micro_batch_size_per_gpu if size is None else size
        data.meta_info["use_dynamic_bsz"] = section.log_prob_use_dynamic_bsz
        data.meta_info["max_token_len"] = section.log_prob_max_token_len_per_gpu

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate()
    def update_actor(self, data: DataProto) -> DataProto:
        """PPO updates on this rank's share; the weights' version becomes meta_info["global_steps"]."""
        metrics = self.updated("actor", self.actor.update_policy, data, self.actor_config.ppo_epochs)
        self.weights_version = int(data.meta_info["global_steps"])
        metrics |= peak_memory(self.device_name)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Load the actor's part, saved by any number of ranks; the version is that of `.../global_step_<N>/`."""
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        step = re.fullmatch(r"global_step_(\d+)", Path(local_path).parent.name)
        self.weights_version = int(step.group(1)) if step else self.weights_version + 1
        self.rollout_version = None
        if self.rank == 0:
            logger.debug(f"actor loaded from {local_path}: weights version {self.weights_version}")
