"""What ranks keep and load, what sharing sequences or layers costs, and planned memory: gloo ranks on one machine."""

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, exact_peaks, ratios, resident_bytes, restart_peak, row, say
from tests.helpers.ranks import run_ranks
from verl.config.common import CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.planning.memory_trace import MicroBatch, trace_update
from verl.training.engine import FSDPEngine
from verl.training.parallel.sequence_parallel import set_ulysses_sequence_parallel_group
from verl.training.parallel.sharding import full_tensor, local_tensor
from verl.training.policy import get_policy

WIDE: dict[str, int] = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, vocab_size=8192)
DEEP: dict[str, int] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=1024)
SMALL: dict[str, int] = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=1024)
REPETITIONS = 5
SEQUENCE = 4096
#: settings of an engine whose ranks each have a row of their own, or share two rows in pairs
SHARING: dict[str, dict[str, int]] = {
    "nothing": {}, "sequences": {"ulysses_sequence_parallel_size": 2}, "layers": {"tensor_parallel_size": 2},
}  # fmt: skip
#: ranks, model settings and engine settings whose update's peak memory is predicted and measured
PLANNED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1_rank": (1, {}, {}),
    "2_ranks_checkpointing": (2, {"enable_gradient_checkpointing": True}, {}),
    "4_ranks": (4, {}, {}),
    "2_ranks_lora": (2, {"lora_rank": 16}, {}),
    "2_ranks_offload": (2, {"enable_activation_offload": True}, {"param_offload": True, "optimizer_offload": True}),
    "4_ranks_sequence_parallel": (4, {"enable_gradient_checkpointing": True}, {"ulysses_sequence_parallel_size": 2}),
}
MODERATE: dict[str, int] = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, vocab_size=8192)
PLANNED_ROWS, PLANNED_TOKENS = 2, 256  # of a micro-batch, half of the tokens are the response


def save_model(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> str:
    """A random Llama with half as many key heads as query heads, in several files; gives the folder."""
    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads // 2,
                         max_position_embeddings=2 * SEQUENCE, pad_token_id=0)  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="100MB")
    return str(folder)


def make_engine(path: str, **engine: Any) -> FSDPEngine:
    """A float32 engine with SGD, which keeps no state."""
    model = HFModelConfig(path=path, load_tokenizer=False, enable_gradient_checkpointing=False)
    settings = FSDPEngineConfig(**{"dtype": "float32", **engine})
    made = FSDPEngine(model, settings, FSDPOptimizerConfig(optimizer="SGD"), CheckpointConfig(), device="cpu")
    made.initialize()
    return made


def on_rank_loading(rank: int, world_size: int, warm_up: str, path: str) -> dict[str, float]:
    """Bytes of this rank: its shard, the largest layer, the peak while loading above what the imports hold."""
    make_engine(warm_up)  # imports, and buffers that every engine has
    with exact_peaks():
        restart_peak()
        before = resident_bytes()
        engine = make_engine(path)
        peak = resident_bytes(peak=True) - before
    parameters = list(engine.module.parameters())
    layer = sum(p.numel() * p.element_size() for p in engine.module.model.layers[0].parameters())
    shard = sum(local_tensor(p).numel() * p.element_size() for p in parameters)
    return {"peak": peak, "layer": layer, "shard": shard}


def on_rank_gradients(rank: int, world_size: int, path: str, deferred: bool) -> float:
    """Bytes per parameter by which this rank has grown after a micro-batch that is not the last one."""
    engine = make_engine(path, defer_gradient_sync=deferred)
    ids = torch.randint(5, 1000, (1, 16), generator=torch.Generator().manual_seed(rank))
    count = sum(p.numel() for p in engine.module.parameters())
    with engine.train_mode(), exact_peaks():
        for last in (False, True):  # the first step makes what later ones reuse
            engine.backward(engine.module(input_ids=ids, labels=ids).loss, is_last_micro_batch=last)
        engine.optimizer_zero_grad()
        restart_peak()
        before = resident_bytes()
        engine.backward(engine.module(input_ids=ids, labels=ids).loss, is_last_micro_batch=False)
        restart_peak()
        return (resident_bytes() - before) / count


def on_rank_sharing(
    rank: int, world_size: int, path: str, length: int, repetitions: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of an update with each of SHARING, in turn, and how far its gradients are from those of the first."""
    engines = {name: make_engine(path, **settings) for name, settings in SHARING.items()}
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=False)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(repetitions + 1):
        for name, engine in engines.items():
            size = world_size // engine.get_data_parallel_size()
            rows = [torch.randint(5, 1000, (1, length), generator=torch.Generator().manual_seed(r))
                    for r in range(rank - rank % size, rank - rank % size + size)]  # fmt: skip
            dist.barrier()
            started = time.perf_counter()
            with engine.train_mode():
                engine.optimizer_zero_grad()
                for number, ids in enumerate(rows):
                    mask = torch.ones_like(ids)
                    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
                    batch = TensorDict({**columns, "responses": ids[:, length // 2 :]}, batch_size=1)
                    log_probs, _ = policy.log_probs(engine.module, batch, temperature=1.0, with_entropy=False)
                    loss = -log_probs.mean() / len(rows)
                    engine.backward(loss, is_last_micro_batch=number == len(rows) - 1)
            if repetition:
                seconds[name].append(time.perf_counter() - started)
    set_ulysses_sequence_parallel_group(None)
    expected, *others = ([full_tensor(p.grad) for p in e.module.parameters()] for e in engines.values())
    largest = max(float(g.abs().max()) for g in expected)
    errors = [max(float((a - b).abs().max()) for a, b in zip(of, expected, strict=True)) / largest for of in others]
    return seconds, dict(zip(list(engines)[1:], errors, strict=True))


def update(engine: FSDPEngine, micro_batches: int, rows: int, length: int) -> None:
    """An optimizer step on random rows without padding."""
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=False)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        for number in range(micro_batches):
            ids = torch.randint(5, 1000, (rows, length))
            mask = torch.ones_like(ids)
            columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
            batch = TensorDict({**columns, "responses": ids[:, length // 2 :]}, batch_size=rows)
            with engine.autocast():
                log_probs, _ = policy.log_probs(engine.module, batch, temperature=1.0, with_entropy=False)
            engine.backward(-log_probs.mean(), is_last_micro_batch=number == micro_batches - 1)
        engine.optimizer_step()


def on_rank_memory(
    rank: int, world_size: int, warm_up: str, path: str, model: dict[str, Any], settings: dict[str, Any]
) -> float:
    """Bytes by which this rank grew above what the imports hold, at the peak of its second update."""
    made = [FSDPEngine(HFModelConfig(path=p, load_tokenizer=False, **{"enable_gradient_checkpointing": False, **model}),
                       FSDPEngineConfig(dtype="float32", **settings), FSDPOptimizerConfig(lr=1e-4), CheckpointConfig(),
                       device="cpu") for p in (warm_up, path)]  # fmt: skip
    small, engine = made
    small.initialize()
    update(small, 2, 1, 32)
    del small, made[0]
    gc.collect()
    with exact_peaks():
        restart_peak()
        before = resident_bytes()
        engine.initialize()
        update(engine, 1, PLANNED_ROWS, PLANNED_TOKENS)
        restart_peak()
        update(engine, 2, PLANNED_ROWS, PLANNED_TOKENS)
        return resident_bytes(peak=True) - before


def predicted(path: str, ranks: int, model: dict[str, Any], settings: dict[str, Any]) -> int:
    """Bytes that a dry run predicts for such an update."""
    config = HFModelConfig(path=path, load_tokenizer=False, **{"enable_gradient_checkpointing": False, **model})
    engine = FSDPEngineConfig(dtype="float32", **settings)
    micro = MicroBatch(PLANNED_ROWS, PLANNED_TOKENS // 2, PLANNED_TOKENS - PLANNED_TOKENS // 2)
    hf_config = AutoConfig.from_pretrained(path)
    return sum(trace_update(hf_config, config, engine, FSDPOptimizerConfig(lr=1e-4), micro, ranks).values())


def planner_rows(folder: Path) -> list[Row]:
    """Peak memory of updates on ranks against what the planner predicted of them."""
    paths = [save_model(folder / name, sizes, torch.float32) for name, sizes in (("small", SMALL), ("mid", MODERATE))]
    rows, errors = [], []
    for name, (ranks, model, settings) in PLANNED.items():
        say(f"memory of an update: {name.replace('_', ' ')}")
        expected = predicted(paths[1], ranks, model, settings)
        measured = run_ranks(on_rank_memory, ranks, *paths, model, settings)
        errors.append(max(abs(expected / m - 1) for m in measured))
        rows += [row(f"memory_{name}", [m / 2**20 for m in measured], f"MiB, predicted {expected / 2**20:,.0f}")]
    unit = "of the measured peak, largest"
    return [Row("planner_error_max", max(errors), unit, min(errors), max(errors), len(errors)), *rows]


def run() -> list[Row]:
    """Gradient bytes, loading peaks, sequence and tensor parallelism, planned memory."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        wide = save_model(Path(folder) / "wide", WIDE, torch.bfloat16)
        deep = save_model(Path(folder) / "deep", DEEP, torch.float32)
        say("loading on 4 ranks")
        loads = run_ranks(on_rank_loading, 4, deep, wide)
        say("gradients of micro-batches on 4 ranks")
        gradients = {deferred: run_ranks(on_rank_gradients, 4, wide, deferred) for deferred in (False, True)}
        say(f"sequences of {SEQUENCE} on 4 ranks")
        shared = run_ranks(on_rank_sharing, 4, deep, SEQUENCE, max(1, REPETITIONS // 2))
        planned = planner_rows(Path(folder))
    seconds = shared[0][0]
    return [
        row("grad_bytes_per_parameter_4_ranks", gradients[False], "bytes"),
        row("grad_bytes_per_parameter_4_ranks_deferred", gradients[True], "bytes"),
        row("load_peak_over_shard", [(r["peak"] - r["layer"]) / r["shard"] for r in loads],
            "times a rank's shard, above one layer"),
        row("load_peak", [r["peak"] / 2**20 for r in loads], "MiB"),
        row("load_shard", [r["shard"] / 2**20 for r in loads], "MiB"),
        row("sequence_parallel_step_ratio", ratios(seconds["sequences"], seconds["nothing"]),
            "times, 2 ranks a sequence / 1"),
        row("tensor_parallel_step_ratio", ratios(seconds["layers"], seconds["nothing"]), "times, 2 ranks a layer / 1"),
        row("sequence_parallel_step", seconds["sequences"], "s"),
        row("tensor_parallel_step", seconds["layers"], "s"),
        row("sequence_parallel_gradient_difference", [errors["sequences"] for _, errors in shared], "relative"),
        row("tensor_parallel_gradient_difference", [errors["layers"] for _, errors in shared], "relative"),
        *planned,
    ]  # fmt: skip
