"""Peak memory of a rank's update, traced with tensors that have shapes but no storage: no weight is read or computed.

The engine's own parts run: FSDP2 over imagined ranks (torch's process group "fake"), adapters, checkpointing, packing,
the chunked head, the optimizer. So what they hold is counted rather than described a second time.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.config.engine import FSDPEngineConfig
from verl.config.model import LOGITS_CHUNK, HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, build_optimizer
from verl.models.loading import torch_dtype_of
from verl.planning.memory_estimate import ACTIVATIONS
from verl.training.engine import build
from verl.training.parallel import sharding
from verl.training.peft_weights import without_adapters
from verl.training.policy.attention import make_packable
from verl.training.policy.causal_lm import call_as_forward, response_log_probs
from verl.training.policy.packing import pack
from verl.training.policy.prefix_tree import PrefixTree
from verl.utils.problems import one_line

# Models of 4 and of 5 layers are traced: their difference is what each further layer adds. With fewer layers, what
# FSDP2 holds of neighbouring layers (the next one's weights, the last one's gradients) is not there in full.
LAYERS = (4, 5)
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer (two moments)"
HELD = (WEIGHTS, GRADIENTS, OPTIMIZER)
GATHERED = "gathered weights, gradients in exchange"
LOGITS = "logits of a micro-batch"
TEMPORARY = "temporary tensors of the optimizer's step"


@dataclass(frozen=True)
class MicroBatch:
    """`rows` sequences of `prompt` + `response` tokens each, without padding.

    `samples`: rows that share one prompt's forward. `adds_to_gradients`: it follows another one of its update.
    """

    rows: int
    prompt: int
    response: int
    samples: int = 1
    adds_to_gradients: bool = True
    chunk_tokens: int = LOGITS_CHUNK
    with_entropy: bool = False


def trace_update(
    hf_config: Any, model: HFModelConfig, engine: FSDPEngineConfig, optimizer: FSDPOptimizerConfig, micro: MicroBatch,
    ranks: int, on_gpu: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes of one rank by part at the moment of an update in which it holds most; together they are its peak.

    An update has weights and optimizer on its device whatever param_offload and optimizer_offload say. `offload_policy`
    and offloaded activations free memory on GPUs only: CPU ranks ignore the former and make copies of the latter.
    Raises whatever a model raises that cannot run without numbers (mixtures of experts with a loop over their experts),
    and RuntimeError in a process that has a process group.
    """
    layers, tensor_parallel = hf_config.get_text_config().num_hidden_layers, engine.tensor_parallel_size
    counts = LAYERS if layers > LAYERS[-1] else (layers,)
    # Ranks that split layers are modelled as fewer ranks with narrower layers: each holds full embeddings.
    with _imagined_ranks(ranks // tensor_parallel):
        configs = [_part_of(hf_config, count, tensor_parallel) for count in counts]
        traces = [_trace(config, model, engine, optimizer, micro, on_gpu) for config in configs]
    first, last, further = traces[0], traces[-1], layers - counts[0]  # none further where all layers were traced
    parts = {name: first[name] + further * (last[name] - first[name]) for name in first}
    if on_gpu and engine.offload_policy:
        parts |= dict.fromkeys((*HELD, TEMPORARY), 0)
    return _at_peak(parts, micro.adds_to_gradients)


def trace_if_possible(hf_config: Any, *args: Any) -> dict[str, int] | None:
    """`trace_update`, or None for a model that cannot be traced, with the reason in the log."""
    try:
        return trace_update(hf_config, *args)
    except Exception as e:  # the model's code may raise anything
        logger.info("the memory of {} cannot be traced: {!r}", type(hf_config).__name__, one_line(e))
        return None


def _at_peak(parts: dict[str, int], adds_to_gradients: bool) -> dict[str, int]:
    """The parts that exist together in the backward or in the optimizer's step, whichever takes more."""
    backward = {name: parts[name] for name in (*HELD, GATHERED, ACTIVATIONS, LOGITS)}
    if not adds_to_gradients:
        backward[GRADIENTS] = 0  # those that exist by then are counted in GATHERED
    step = {name: parts[name] for name in (*HELD, TEMPORARY)}
    return max(backward, step, key=lambda moment: sum(moment.values()))


@contextmanager
def _imagined_ranks(ranks: int) -> Iterator[None]:
    """This process as rank 0 of `ranks`, whose collective calls move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("memory is traced before a process group is made, as dry runs do")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _part_of(hf_config: Any, layers: int, splitting: int) -> Any:
    """The config of the first `layers` layers, each with one of `splitting` parts of its heads and its MLP."""
    changed = copy.deepcopy(hf_config)
    text = changed.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    if splitting > 1:
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name) // splitting)
    return changed


def _move_to_cpu(module: nn.Module, dtype: torch.dtype) -> None:
    """Move parameters (as `dtype`) and buffers from "meta" to the CPU, where FakeTensorMode gives them no storage."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}  # weights may be tied
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in replaced:
                    kind = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype
                    replaced[tensor] = torch.empty(tensor.shape, dtype=kind, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        replaced[tensor] = nn.Parameter(replaced[tensor], requires_grad=tensor.requires_grad)
                if tensor is not None:
                    tensors[name] = replaced[tensor]


class _Live(TorchDispatchMode):
    """The storages that exist, and those that existed when together they were largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first_uses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # storage -> (shape, dtype)
        self.reset()

    def reset(self) -> None:
        """Forget the peak."""
        self.peak, self.at_peak = 0, []  # bytes; (bytes, shape, dtype) of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local tensor comes here afterwards
        out = func(*args, **(kwargs or {}))
        known = len(self.first_uses)
        for tensor in tree_leaves((out, args)):
            if isinstance(tensor, torch.Tensor):
                self.first_uses.setdefault(tensor.untyped_storage(), (tuple(tensor.shape), tensor.dtype))
        if len(self.first_uses) <= known and func.namespace not in ("fsdp", "c10d"):
            return out
        # FSDP2 frees and fills storages by their sizes, which is no operation: all are asked again.
        now = sum(storage.nbytes() for storage in self.first_uses)
        if now > self.peak:
            self.peak = now
            self.at_peak = [(storage.nbytes(), *what) for storage, what in self.first_uses.items()]
        return out


def _trace(
    hf_config: Any, model: HFModelConfig, engine: FSDPEngineConfig, optimizer: FSDPOptimizerConfig, micro: MicroBatch,
    on_gpu: bool,
) -> dict[str, int]:  # fmt: skip
    """Bytes by part of this model's update: HELD, and what its backward and its optimizer's step (TEMPORARY) add."""
    shards = engine.fsdp_size // engine.tensor_parallel_size  # -1, all ranks, remains -1
    mesh = sharding.create_device_mesh(dist.get_world_size(), shards, "cpu")
    ulysses = engine.ulysses_sequence_parallel_size
    batch = _batch(micro, dist.new_group(list(range(ulysses))) if ulysses > 1 else None)
    master_dtype = torch_dtype_of(engine.model_dtype, "model_dtype")
    module = _meta_module(hf_config, model, master_dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), _Live() as live:
        _move_to_cpu(module, master_dtype)
        if model.enable_gradient_checkpointing:
            without_adapters(module).gradient_checkpointing_enable({"use_reentrant": False})
        module = sharding.apply_fsdp2(
            module, mesh, wrap_policy=dict(engine.wrap_policy or {}), offload_policy=False,
            reshard_after_forward=engine.reshard_after_forward, forward_prefetch=engine.forward_prefetch,
            mp_policy=build.mixed_precision_policy(engine),
        )  # fmt: skip
        # Whole, as FSDP2 gathers them, and this rank's parts.
        weight_shapes = {tuple(x.shape) for p in module.parameters() for x in (p, sharding.local_tensor(p))}
        module.train()
        optim = build_optimizer(module.named_parameters(), optimizer)
        held = _hold_all(module, optim, on_gpu)
        live.reset()
        optim.step()
        temporary = live.peak - sum(held.values()) - _nbytes(module.buffers())
        if not micro.adds_to_gradients:
            optim.zero_grad(set_to_none=True)
        live.reset()
        _run_backward(module, model, engine, batch, on_gpu)
    logits, of_weights = _logits_and_weights(live.at_peak, weight_shapes, hf_config.get_text_config().vocab_size, micro)
    before = held if micro.adds_to_gradients else held | {GRADIENTS: 0}
    gathered = of_weights - sum(before.values())  # what is held has the shapes of weights, too
    activations = live.peak - of_weights - logits
    return held | {GATHERED: gathered, ACTIVATIONS: activations, LOGITS: logits, TEMPORARY: temporary}


def _meta_module(hf_config: Any, model: HFModelConfig, dtype: torch.dtype) -> nn.Module:
    """The model with its adapters on the device "meta", made for packed rows."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        module = build.add_adapters(module, replace(model, lora_adapter_path=None), trains=True)
    if not make_packable(without_adapters(module)):
        raise ValueError(f"the attention of {type(module).__name__} cannot be replaced")
    return module


def _hold_all(module: nn.Module, optim: torch.optim.Optimizer, on_gpu: bool) -> dict[str, int]:
    """Give all trained weights gradients and moments, and return the bytes of each part of HELD."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for param_group in optim.param_groups if on_gpu else ():
        param_group["foreach"] = True  # what torch's optimizers choose there: temporary tensors of all weights
    for p in trained:
        p.grad = torch.zeros_like(p)
    gc.freeze()  # lets the collection look only at what this step leaves
    try:
        optim.step()  # makes the moments; at its first sight of an operation DTensor tries it on whole tensors
        gc.collect()
    finally:
        gc.unfreeze()
    return {
        WEIGHTS: _nbytes(module.parameters()),
        GRADIENTS: _nbytes(p.grad for p in trained),
        OPTIMIZER: _nbytes(x for s in optim.state.values() for x in s.values()),
    }


def _run_backward(
    module: nn.Module, model: HFModelConfig, engine: FSDPEngineConfig, batch: dict[str, Any], on_gpu: bool
) -> None:
    """Forward and backward of a micro-batch under the engine's settings."""
    dtype = torch_dtype_of(engine.dtype, "dtype")
    autocast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(_forget, _remake) if on_gpu else sharding.activations_on_cpu()
    offloading = hooks if model.enable_activation_offload else nullcontext()
    module.set_requires_gradient_sync(not engine.defer_gradient_sync)
    for _ in range(1 + engine.defer_gradient_sync):  # deferred gradients of an earlier micro-batch are whole
        with autocast, offloading:
            log_probs, _ = call_as_forward(module, response_log_probs, temperature=1.0, **batch)
        (-log_probs.mean()).backward()
        del log_probs


def _forget(tensor: torch.Tensor) -> Any:
    """Offloaded activations keep only their shape on the GPU (`sharding.activations_on_cpu`); weights stay."""
    weight = isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)
    return tensor if weight else (tensor.shape, tensor.stride(), tensor.dtype)


def _remake(saved: Any) -> torch.Tensor:
    """What the backward reads: the weight itself, or a tensor like the one that was offloaded."""
    return saved if isinstance(saved, torch.Tensor) else torch.empty_strided(saved[0], saved[1], dtype=saved[2])


def _logits_and_weights(
    at_peak: list[tuple[int, tuple[int, ...], torch.dtype]], weight_shapes: set[tuple[int, ...]], vocabulary: int,
    micro: MicroBatch,
) -> tuple[int, int]:  # fmt: skip
    """(bytes of logits, bytes of weights, gradients and moments) among the storages at the peak, by their shapes."""
    logits = of_weights = 0
    tokens = micro.rows * (micro.prompt + micro.response)
    for nbytes, shape, dtype in at_peak:
        if len(shape) == 2 and shape[1] == vocabulary and shape[0] <= micro.chunk_tokens and shape not in weight_shapes:
            logits += nbytes
        # Flat ones longer than the micro-batch are buffers in which FSDP2 gathers weights or exchanges gradients.
        elif shape in weight_shapes or (dtype.is_floating_point and len(shape) == 1 and shape[0] > tokens):
            of_weights += nbytes
    return logits, of_weights


def _batch(micro: MicroBatch, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Arguments of `response_log_probs` for full rows; their layout is computed here, where numbers are real."""
    width = micro.prompt + micro.response
    ids = torch.zeros(micro.rows, width, dtype=torch.int64)
    mask = torch.ones_like(ids)
    numbers = torch.arange(micro.rows)
    tree = PrefixTree(numbers - numbers % micro.samples, (numbers % micro.samples > 0) * micro.prompt)
    packing = pack(mask, micro.response, tree, group=group)
    # Cached by this first use: under FakeTensorMode their numbers would be unknown.
    packing.parts(), packing.restore, packing.length, packing.segment_index, packing.own_segments  # noqa: B018
    return {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1,
            "responses": ids[:, micro.prompt :].contiguous(), "packing": packing, "with_entropy": micro.with_entropy,
            "chunk_tokens": micro.chunk_tokens}  # fmt: skip


def _nbytes(tensors: Any) -> int:
    """Bytes of this rank's parts."""
    local = (sharding.local_tensor(t) for t in tensors if isinstance(t, torch.Tensor))
    return sum(math.prod(t.shape) * t.element_size() for t in local)
