"""The training engine over FSDP2, on CUDA ranks over NCCL or CPU ranks over gloo."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partialmethod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from verl.config.common import CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, build_optimizer
from verl.models.loading import print_model_size, torch_dtype_of
from verl.models.stored_weights import hf_name
from verl.protocol import DataProto
from verl.training.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.training.engine import batches, build
from verl.training.engine.base import BaseEngine, EngineRegistry, StepResult
from verl.training.host_memory import available_memory
from verl.training.parallel import sharding
from verl.training.parallel.sequence_parallel import (
    get_ulysses_sequence_parallel_group,
    set_ulysses_sequence_parallel_group,
    validate_ulysses_config,
)
from verl.training.parallel.tensor_parallel import styles_of
from verl.training.peft_weights import adapted_layers, adapter_weights, full_weights, peft_models, without_adapters
from verl.training.policy.base import Policy, get_policy
from verl.utils.distributed import ensure_process_group

FUSED = ("Adam", "AdamW")  # PyTorch's optimizers whose fused form takes sharded parameters


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], ["cpu", "cuda"])
class FSDPEngine(BaseEngine):
    """A sharded module, its optimizer and its schedule.

    `mesh`: ranks to shard over, in its dimension "fsdp"; None makes one by fsdp_size. Ranks see different
    data, and a micro-batch's loss must already be divided by the global counts and multiplied by
    `get_data_parallel_size()`: exchanged gradients are averaged over ranks. Neighbouring ranks compute on the rows of
    all of them (`joined`): ulysses_sequence_parallel_size groups, each on a part of every sequence, of
    fsdp_config.tensor_parallel_size ranks, each with a part of every layer (mesh dimension "tp").
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None,
        checkpoint_config: CheckpointConfig,
        *,
        device: str | None = None,
        mesh: DeviceMesh | None = None,
    ):
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.device_type = torch.device(device).type if device else ("cuda" if torch.cuda.is_available() else "cpu")
        self.mesh = mesh
        self.compute_dtype = torch_dtype_of(engine_config.dtype, "fsdp_config.dtype")
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._trains = optimizer_config is not None and not engine_config.forward_only
        self._moves = self.device_type != "cpu" and not engine_config.offload_policy
        self.is_param_offload_enabled = engine_config.param_offload and self._moves
        self.is_optimizer_offload_enabled = engine_config.optimizer_offload and self._moves
        self._depth = {"train": 0, "eval": 0}
        self._loss_is_bad: torch.Tensor | None = None
        self._checkpoints: bool | None = None  # whether layers are recomputed; None: as the model was loaded
        self.sequence_parallel_size = engine_config.ulysses_sequence_parallel_size
        self.tensor_parallel_size = engine_config.tensor_parallel_size
        self.sequence_group: dist.ProcessGroup | None = None
        self.joint_size = self.sequence_parallel_size * self.tensor_parallel_size  # ranks that compute on the same rows
        self.joint_group: dist.ProcessGroup | None = None

    @classmethod
    def of_section(cls, section: str, *parts: Any, **options: Any) -> FSDPEngine:
        """An initialized engine; a ValueError about a key of `fsdp_config` names the config's `section` before it."""
        try:
            engine = cls(*parts, **options)
            engine.initialize()
        except ValueError as error:
            if str(error).startswith("fsdp_config."):
                error.args = (f"{section}.{error}",)
            raise
        return engine

    def initialize(self) -> None:
        """Loads, wraps, shards; then optimizer and schedule unless the engine only runs forward."""
        ensure_process_group(self.device_type)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        on_cuda = self.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        if self.mesh is None:
            self.mesh = sharding.create_device_mesh(
                self.world_size, self.engine_config.fsdp_size, self.device_type, self.tensor_parallel_size
            )
        self._make_groups()
        if self.engine_config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # A warning only for the rest: sampling tokens sums probabilities, which has no deterministic CUDA kernel.
            torch.use_deterministic_algorithms(True, warn_only=True)

        _seed_everything(self.engine_config.seed)
        module, stored = build.build_module(self.model_config, self.engine_config, trains=self._trains)
        if self.sequence_parallel_size > 1:
            heads = without_adapters(module).config.num_attention_heads // self.tensor_parallel_size
            validate_ulysses_config(heads, self.sequence_parallel_size)
        splits_layers, styles = self.tensor_parallel_size > 1, {}
        if splits_layers:
            by_tokens = self.engine_config.sequence_parallel
            styles = styles_of(without_adapters(module), self.tensor_parallel_size, by_tokens)
        if not self._trains:
            module.requires_grad_(False)
        build.check_same_weights(module)
        if self.rank == 0:
            print_model_size(module)
        whole = sharding.tensors_to_fill(module)
        self.module = sharding.apply_fsdp2(
            module,
            self.mesh,
            wrap_policy=dict(self.engine_config.wrap_policy or {}),
            reshard_after_forward=self.engine_config.reshard_after_forward,
            mp_policy=build.mixed_precision_policy(self.engine_config),
            offload_policy=self.engine_config.offload_policy,
            forward_prefetch=self.engine_config.forward_prefetch,
            tensor_parallel=styles,
        )
        if stored is not None:
            stored.fill(self.module, self.device)
        if whole:
            offloaded = self.engine_config.offload_policy and on_cuda
            sharding.fill_from_rank_zero(self.module, whole, self.device, keep_on_cpu=offloaded)
        del whole
        self.module.eval()
        if self._trains:
            # torch's optimizers cannot update parameters on two meshes, those that are split and others, in one call.
            # On a CPU they make several passes over each tensor unless they are fused.
            options = {}
            if splits_layers:
                options["foreach"] = False
            elif self.device_type == "cpu" and self.optimizer_config.optimizer in FUSED:
                options["fused"] = True
            self.optimizer = build_optimizer(self.module.named_parameters(), self.optimizer_config, **options)
            self.lr_scheduler = build.build_lr_scheduler(self.optimizer, self.optimizer_config)
        trained = self.module, self.optimizer, self.lr_scheduler
        tokenizer, contents = self.model_config.tokenizer, self.checkpoint_config
        self.checkpoint_manager = FSDPCheckpointManager(*trained, tokenizer, contents, device=self.device)
        # From here on ranks draw numbers of their own (sampling, dropout); those that split a layer draw the same.
        _seed_everything(self.engine_config.seed + 1 + self.rank // self.tensor_parallel_size)
        if self.is_param_offload_enabled:
            self.to("cpu", model=True, optimizer=False)

    def _make_groups(self) -> None:
        sharing, splitting = self.sequence_parallel_size, self.tensor_parallel_size
        if self.world_size % self.joint_size:
            product = f" x tensor_parallel_size={splitting}" if splitting > 1 else ""
            what = f"ulysses_sequence_parallel_size={sharing}{product} does not divide the {self.world_size} ranks"
            raise ValueError(f"{what}; use a divisor.")
        splits = sharding.tensor_parallel_mesh(self.mesh)
        if splitting != (1 if splits is None else splits.size()):
            raise ValueError(f"the given mesh {self.mesh} has no dimension 'tp' of fsdp_config.tensor_parallel_size="
                             f"{splitting} ranks; leave the mesh out.")  # fmt: skip
        if self.joint_size > 1:
            self.joint_group, _ = dist.new_subgroups(self.joint_size)
        if sharing > 1 and splitting == 1:
            self.sequence_group = self.joint_group
        elif sharing > 1:  # of the ranks that hold the same part of each layer
            ranks = torch.arange(self.world_size).view(-1, sharing, splitting).transpose(1, 2).reshape(-1, sharing)
            self.sequence_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())

    def get_data_parallel_size(self) -> int:
        return self.world_size // self.joint_size

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.joint_size

    def gather_over_sequence_group(self, data: DataProto) -> tuple[DataProto, slice]:
        if self.joint_group is None:
            return data, slice(0, len(data))
        parts: list[Any] = [None] * self.joint_size
        dist.all_gather_object(parts, data, group=self.joint_group)
        if "group_index" in data.batch.keys():  # numbers of different ranks' groups may be the same
            seen = 0
            for part in parts:
                numbers = torch.unique_consecutive(part.batch["group_index"], return_inverse=True)[1]
                part.batch["group_index"] = numbers + seen
                seen += int(numbers.max()) + 1
        place = self.rank % self.joint_size
        first = sum(len(part) for part in parts[:place])
        return DataProto.concat(parts), slice(first, first + len(data))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves parameters (with gradients) and optimizer state to "cpu" or back to the accelerator."""
        if not self._moves:
            return
        optimizer = optimizer and self.optimizer is not None
        if torch.device(device).type == "cpu":
            if model:
                sharding.offload_fsdp_model_to_cpu(self.module)
            if optimizer:
                sharding.offload_fsdp_optimizer(self.optimizer)
        else:
            if model:
                sharding.load_fsdp_model_to_gpu(self.module, self.device)
            if optimizer:
                sharding.load_fsdp_optimizer(self.optimizer, self.device)

    def unsharded(self) -> AbstractContextManager:
        return sharding.kept_gathered(self.module, self.engine_config.reshard_after_forward)

    @contextmanager
    def _mode(self, mode: str) -> Iterator[FSDPEngine]:
        outermost = not any(self._depth.values())
        optimizer = mode == "train" and self.is_optimizer_offload_enabled
        was_training = self.module.training
        if outermost and self.is_param_offload_enabled:
            self.to(self.device_type, model=True, optimizer=False)
        if optimizer and not self._depth["train"]:
            self.to(self.device_type, model=False, optimizer=True)
        self._depth[mode] += 1
        self.module.train(mode == "train")
        group = get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(self.sequence_group)
        try:
            yield self
        finally:
            self._depth[mode] -= 1
            set_ulysses_sequence_parallel_group(group)
            self.module.train(was_training)
            # A forward without backward leaves the root gathered; weights changed afterwards would not be seen there.
            sharding.reshard(self.module)
            if optimizer and not self._depth["train"]:
                self.to("cpu", model=False, optimizer=True)
            if outermost and self.is_param_offload_enabled:
                self.to("cpu", model=True, optimizer=False)

    train_mode, eval_mode = partialmethod(_mode, "train"), partialmethod(_mode, "eval")

    @cached_property
    def _models(self) -> list[PreTrainedModel]:
        return build.outermost_pretrained(self.module)

    def _checkpoint_where_needed(self, tokens: int) -> None:
        """Switch the recomputation of layers on or off for a forward of so many tokens; all ranks that share it agree,
        since the layers' collective calls are made again in a recomputation.
        """
        if self.device_type == "cpu":
            free = available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        else:  # what PyTorch's allocator holds without a tensor in it is free too
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + held
        itemsize = self.compute_dtype.itemsize
        needed = any(build.needs_checkpointing(None, model.config, tokens, itemsize, free) for model in self._models)
        if self.joint_group is not None:
            flag = torch.tensor(int(needed), device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.joint_group)
            needed = bool(flag)
        if needed != self._checkpoints:
            build.checkpoint_layers(self.module, needed)
            self._checkpoints = needed

    @contextmanager
    def autocast(self, tokens: int = 0) -> Iterator[None]:
        """For forwards: autocast to `fsdp_config.dtype`, and activations to the CPU with enable_activation_offload.

        `tokens` of a forward with a backward pass decide whether its layers are checkpointed, where
        enable_gradient_checkpointing is null: if their activations would take more than half of the free memory.
        """
        if tokens and self.model_config.enable_gradient_checkpointing is None:
            self._checkpoint_where_needed(tokens)
        lower = self.compute_dtype != torch.float32
        offload = sharding.activations_on_cpu() if self.model_config.enable_activation_offload else nullcontext()
        with torch.autocast(self.device_type, dtype=self.compute_dtype) if lower else nullcontext(), offload:
            yield

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> dict:
        return batches.forward_backward_batch(self, self._policy, data, loss_function, forward_only)

    @cached_property
    def _policy(self) -> Policy:
        """Of train_batch and infer_batch; the trainers have their own."""
        policy = get_policy(self.model_config.policy.name, **self.model_config.policy.kwargs)
        policy.set_forward(remove_padding=self.model_config.use_remove_padding, share_prompt=False)
        return policy

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model without its adapters: the reference policy of a LoRA run."""
        if not self.has_adapters:
            raise RuntimeError("disable_adapter() was asked of a model without adapters; set model.lora_rank above 0.")
        layers = list(adapted_layers(self.module).values())
        trained = [p for p in self.module.parameters() if p.requires_grad]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            for p in trained:
                p.requires_grad_(True)

    @property
    def has_adapters(self) -> bool:
        """Whether some layer carries a LoRA adapter."""
        return bool(adapted_layers(self.module))

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_is_bad = None

    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None:
        bad = ~torch.isfinite(loss.detach())
        self._loss_is_bad = bad if self._loss_is_bad is None else self._loss_is_bad | bad
        if isinstance(self.module, FSDPModule):
            exchanged = is_last_micro_batch or not self.engine_config.defer_gradient_sync
            self.module.set_requires_gradient_sync(exchanged)
            self.module.set_is_last_backward(exchanged)
            # Copies of a shard (the "ddp" dimension) need the sum of all micro-batches only.
            self.module.set_requires_all_reduce(is_last_micro_batch)
        loss.backward()

    def optimizer_step(self, max_grad_norm: float | None = None) -> StepResult:
        """Clips to `max_grad_norm` (default: optim.clip_grad) and steps; a bad number anywhere skips everywhere."""
        max_norm = self.optimizer_config.max_grad_norm() if max_grad_norm is None else max_grad_norm
        params = [p for p in self.module.parameters() if p.requires_grad]
        norm = sharding.grad_norm(params, self.mesh)
        bad = torch.tensor(float(not math.isfinite(norm)), device=self.device)
        if self._loss_is_bad is not None:
            bad = torch.maximum(bad, self._loss_is_bad.float())
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            self.optimizer_zero_grad()
            return StepResult(grad_norm=norm, skipped=True)
        if max_norm > 0 and norm > max_norm:
            sharding.scale_grads(params, max_norm / norm)
        self.optimizer.step()
        self.optimizer_zero_grad()
        return StepResult(grad_norm=norm, skipped=False)

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = sharding.BUCKET_BYTES, check_finite: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        sharding.reshard(self.module)
        options = {"bucket_bytes": bucket_bytes, "check_finite": check_finite}
        yield from full_weights(self.module, self.device, dtype, **options)

    def get_adapter(self, check_finite: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
        sharding.reshard(self.module)
        model = peft_models(self.module).get("")
        other = [name for name, p in self.module.named_parameters() if p.requires_grad and ".lora_" not in name]
        if model is None or other:
            what = f"trains {hf_name(other[0])} outside of its adapter" if model else "has no adapter of its own"
            raise ValueError(f"actor_rollout_ref.rollout.lora_as_adapter=true, but the model {what}; set it to false.")
        tensors = adapter_weights(model, self.device, check_finite=check_finite)
        return model.peft_config[model.active_adapter], tensors

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Writes checkpoint.save_contents into `local_path`; publishing and rotating are CheckpointWriter's."""
        sharding.reshard(self.module)
        self.checkpoint_manager.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def save_is_finished(self) -> bool:
        return self.checkpoint_manager.save_is_finished()

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Reads checkpoint.load_contents from `local_path`, written on any number of ranks."""
        sharding.reshard(self.module)
        self.checkpoint_manager.load_checkpoint(local_path, hdfs_path, del_local_after_load)
        # The state was read to where the parameters are, which may be offloaded.
        self.to("cpu" if self.is_optimizer_offload_enabled else self.device_type, model=False, optimizer=True)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
