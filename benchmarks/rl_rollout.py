"""The hybrid engine: sending weights to vLLM, and its rollouts compared with generation by transformers."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, ratios, row
from verl.config.common import CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.training.engine.fsdp import FSDPEngine
from verl.training.policy import get_policy

PROMPTS, SAMPLES, PROMPT, RESPONSE = 8, 8, 64, 64
LARGE = {"width": 512, "layers": 8, "vocabulary": 32_000}  # its weights are sent
SMALL = {"width": 128, "layers": 4, "vocabulary": 1024}  # it generates
REPETITIONS = 7


def save_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    """A random Llama with heads of 32."""
    torch.manual_seed(0)
    heads = width // 32
    LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, dtype="float32",
    )).save_pretrained(folder)  # fmt: skip


def engine_of(folder: Path, dtype: str = "float32") -> FSDPEngine:
    """The training engine of a CPU rank, which computes in `dtype`."""
    model = HFModelConfig(path=str(folder), load_tokenizer=False, enable_gradient_checkpointing=False)
    engine = FSDPEngine(model, FSDPEngineConfig(dtype=dtype), FSDPOptimizerConfig(lr=1e-6), CheckpointConfig(),
                        device="cpu")
    engine.initialize()
    return engine


def rollout_of(name: str, engine: FSDPEngine, **more: object) -> Any:
    """A rollout on the engine's weights."""
    config = RolloutConfig(name=name, prompt_length=PROMPT, response_length=RESPONSE, dtype="float32",
                           max_num_seqs=PROMPTS * SAMPLES, **{"ignore_eos": True} | more)
    made = get_rollout_class(name, "sync")(config, engine.model_config, engine.mesh)
    made.bind_actor(engine, get_policy("causal_lm"))
    return made


def prompts(vocabulary: int, ends: list[int] | None = None) -> DataProto:
    """8 prompts of 64 tokens, 8 samples each, which end with a token of `ends`."""
    ids = torch.randint(5, vocabulary, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    meta = {"n": SAMPLES, "eos_token_id": ends, "pad_token_id": 0, "do_sample": True, "temperature": 1.0,
            "global_steps": 1}  # fmt: skip
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
    return DataProto.from_dict(tensors=tensors, meta_info=meta)


def sync(folder: Path) -> Row:
    """Seconds until vLLM has taken all weights, by their size in GB."""
    engine = engine_of(folder)
    rollout = rollout_of("vllm", engine)
    gigabytes = sum(p.numel() * p.element_size() for p in engine.module.parameters()) / 1e9
    work: dict[str, Callable[[], object]] = {"sync": lambda: rollout.update_weights(engine.get_per_tensor_param())}
    seconds = alternate(work, REPETITIONS)["sync"]
    rollout.close()
    return row("weight_sync_seconds_per_gb", [s / gigabytes for s in seconds], f"s / GB, float32, {gigabytes:.2f} GB")


def generation(folder: Path, vocabulary: int) -> list[Row]:
    """8 x 8 answers of exactly 64 tokens, both ways, weights sent before."""
    engine = engine_of(folder)
    vllm, plain = rollout_of("vllm", engine), rollout_of("hf", engine)
    vllm.update_weights(engine.get_per_tensor_param())
    asked = prompts(vocabulary)
    works: dict[str, Callable[[], object]] = {name: partial(rollout.generate_sequences, asked)
                                              for name, rollout in (("hf", plain), ("vllm", vllm))}
    seconds = alternate(works, REPETITIONS)
    vllm.close()
    tokens = PROMPTS * SAMPLES * RESPONSE
    return [row("vllm_vs_hf_rollout", ratios(seconds["hf"], seconds["vllm"]), "times, hf / vllm"),
            row("vllm_rollout", [tokens / s for s in seconds["vllm"]], "tokens / s")]


def uneven(folder: Path, vocabulary: int) -> Row:
    """8 x 8 answers, each token the last one with probability 1/16: rows that are done stay or leave."""
    engine = engine_of(folder)
    stays, leaves = (rollout_of("hf", engine, ignore_eos=False) for _ in range(2))
    stays.drop_at = 0.0
    asked = prompts(vocabulary, list(range(vocabulary // 16)))
    lengths = leaves.generate_sequences(asked).batch["response_mask"].sum(1)
    assert torch.equal(lengths, stays.generate_sequences(asked).batch["response_mask"].sum(1))
    seconds = alternate({"stays": partial(stays.generate_sequences, asked),
                         "leaves": partial(leaves.generate_sequences, asked)}, REPETITIONS)  # fmt: skip
    unit = f"times, stay / leave, {lengths.float().mean():.0f} tokens on average, {lengths.max()} at most"
    return row("hf_rollout_done_rows_leave", ratios(seconds["stays"], seconds["leaves"]), unit)


@contextmanager
def one_rank() -> Iterator[Path]:
    """A process group of this process alone; yields a temporary folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
    finally:
        if dist.is_initialized():  # vLLM's own end takes the process group with it
            dist.destroy_process_group()


def run() -> list[Row]:
    """All rows."""
    with one_rank() as folder:
        large, small = folder / "large", folder / "small"
        save_model(large, **LARGE)
        save_model(small, **SMALL)
        return [sync(large), uneven(small, SMALL["vocabulary"]), *generation(small, SMALL["vocabulary"])]
