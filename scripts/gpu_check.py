"""Runs what is special on GPUs against the CPU reference, then measures: python scripts/gpu_check.py [--json FILE].

Attention kernels, the output head and losses in bfloat16 are compared with float32 on the CPU; trainings (FSDP2 on all
GPUs, the vLLM hybrid with sleep and wake, LoRA, tensor parallel rollouts, SPD, refinement, SFT) run for a few steps and
must end with finite metrics. Then a training step of models of random weights is timed. Without a GPU it says what it
would do.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from scripts.loss_compare import TRAININGS, read_metrics, run
from verl.utils.flops_counter import FlopsCounter
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import FSDPEngine
from verl.workers.policy import get_policy
from verl.workers.policy.attention import BACKENDS
from verl.workers.policy.chunked_log_probs import FinalLogits, chunked_log_probs
from verl.workers.policy.packing import moved, pack

ROOT = Path(__file__).resolve().parents[1]
#: shapes of Qwen2.5-0.5B and -7B
SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064),
}  # fmt: skip
LENGTH, STEPS = 4096, 5
RANKS = "trainer.n_gpus_per_node"


@dataclass(frozen=True)
class Result:
    """One check or measurement: its value with the bound that it must keep, or none."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def holds(self) -> bool:
        return math.isfinite(self.value) and (self.bound is None or self.value <= self.bound)


def batch(rows: int = 8, prompt: int = 40, response: int = 24) -> TensorDict:
    """Rows of different lengths in groups of four with one prompt, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 250, (rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::4, :prompt].repeat_interleave(4, 0)
    asked = torch.randint(1, prompt + 1, (rows // 4,), generator=generator).repeat_interleave(4)[:, None]
    answered = torch.randint(0, response + 1, (rows, 1), generator=generator)
    column = torch.arange(prompt + response)
    mask = ((column >= prompt - asked) & (column < prompt + answered)).long()
    return TensorDict(
        {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
         "responses": (ids * mask)[:, prompt:], "group_index": torch.arange(rows) // 4}, batch_size=rows,
    )  # fmt: skip


def relative(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest norm of a difference relative to the norm of what is expected."""
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(got, expected, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs)


def check_attention(device: torch.device) -> Iterator[Result]:
    """Each backend in bfloat16 against padded attention in float32 on the CPU: outputs and gradients."""
    data, on_cuda = batch(), device.type == "cuda"
    backends = {"sdpa": True, "varlen": on_cuda, "flash_attn": on_cuda and find_spec("flash_attn") is not None}
    for shared in (False, True):
        groups = data["group_index"] if shared else None
        here, there = (pack(data["attention_mask"], 24, groups, device=d) for d in ("cpu", device))
        generator = torch.Generator().manual_seed(1)
        states = [torch.randn(1, heads, here.length, 64, generator=generator) for heads in (4, 2, 2)]
        results = {}
        weights = torch.linspace(-1, 1, 4 * 64 * len(here.tokens)).view(-1, 4, 64)
        for name in ("reference", *(name for name, present in backends.items() if present)):
            if name == "reference":
                backend, packing, inputs = BACKENDS["sdpa"], here, [x.clone() for x in states]
            else:
                backend, packing, inputs = BACKENDS[name], there, [x.to(device, torch.bfloat16) for x in states]
            inputs = [x.requires_grad_() for x in inputs]
            output = backend(*inputs, packing, 0.125, 0.0)
            (output.float() * weights.to(output.device)).sum().backward()
            results[name] = [output, *(x.grad for x in inputs)]
        reference = results.pop("reference")
        for name, got in results.items():
            kind = "shared prompts" if shared else "separate rows"
            yield Result(f"attention {name}, {kind}", relative(got, reference), "relative", 2e-2)


def check_head(device: torch.device) -> Iterator[Result]:
    """The chunked output head in bfloat16 on the device against float32 on the CPU."""
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(64, 512, bias=False), torch.randn(300, 64), torch.randint(0, 512, (300,))
    results = []
    for where, dtype in ((torch.device("cpu"), torch.float32), (device, torch.bfloat16)):
        own = nn.Linear(64, 512, bias=False, device=where, dtype=dtype)
        own.load_state_dict(head.state_dict())
        states = hidden.clone().to(where, dtype).requires_grad_()
        options = {"chunk_tokens": 64, "with_entropy": True}
        output = chunked_log_probs(own, FinalLogits(None, 1.0), states, labels.to(where), **options)
        (output.log_probs - 0.1 * output.entropy).sum().backward()
        results.append([output.log_probs, output.entropy, states.grad, own.weight.grad])
    yield Result("output head in bfloat16", relative(results[1], results[0]), "relative", 2e-2)


def make_engine(path: str, device: torch.device, dtype: str) -> FSDPEngine:
    engine = FSDPEngine(
        HFModelConfig(path=path, load_tokenizer=False), FSDPEngineConfig(dtype=dtype, mixed_precision={}),
        FSDPOptimizerConfig(), CheckpointConfig(), device=device.type,
    )  # fmt: skip
    engine.initialize()
    return engine


def check_step(device: torch.device) -> Iterator[Result]:
    """Log-probs and gradient norm of an engine in bfloat16 on the device against float32 on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0,
        )).save_pretrained(folder)  # fmt: skip
        results = []
        for where, dtype in ((torch.device("cpu"), "float32"), (device, "bfloat16")):
            engine, policy = make_engine(folder, where, dtype), get_policy("causal_lm")
            policy.set_forward(remove_padding=True, share_prompt=True)
            with engine.train_mode(), engine.autocast():
                data = moved(batch(), engine.device)
                log_probs, _ = policy.log_probs(engine.module, data, temperature=1.0, with_entropy=False)
                engine.backward(log_probs.mean(), is_last_micro_batch=True)
                norm = engine.optimizer_step().grad_norm
            results.append([log_probs, torch.tensor([norm])])
            dist.destroy_process_group()
    yield Result("update in bfloat16", relative(results[1], results[0]), "relative", 3e-2)


#: name -> (training of scripts/loss_compare.py, further settings, GPUs it needs)
RUNS = {
    "GRPO, vLLM with sleep and wake": ("grpo", [], 1),
    "GRPO with LoRA": ("grpo", ["actor_rollout_ref.model.lora_rank=8"], 1),
    "GRPO on all GPUs": ("grpo", [f"{RANKS}=ALL"], 2),
    "GRPO, sequence parallel": ("grpo", [f"{RANKS}=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], 2),
    "GRPO, tensor parallel rollout": (
        "grpo", [f"{RANKS}=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], 2
    ),
    "GRPO, tensor parallel": (
        "grpo", [f"{RANKS}=2", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"], 2
    ),
    "GRPO, tensor parallel, tokens split too": (
        "grpo", [f"{RANKS}=2", "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
                 "actor_rollout_ref.actor.fsdp_config.sequence_parallel=true"], 2
    ),
    "GRPO with the refinement loss": ("grpo", ["actor_rollout_ref.actor.refine_loss_coef=0.5"], 1),
    "SPD scorer": ("spd", [], 1), "refinement": ("refinement", [], 1), "SFT": ("sft", [], 1),
    "refinement, sequence parallel": (
        "refinement", ["--nproc_per_node=2", f"{RANKS}=2", "ulysses_sequence_parallel_size=2"], 2
    ),
}  # fmt: skip


def on_gpu(command: list[str], changes: Sequence[str], gpus: int) -> list[str]:
    """A command of scripts/loss_compare.py, which trains on the CPU, on GPUs."""
    words = [{"cpu": "cuda", "trainer.device=cpu": "trainer.device=cuda"}.get(word, word) for word in command]
    changed = {change.partition("=")[0]: change.replace("=ALL", f"={gpus}") for change in changes}
    return [changed.pop(word.partition("=")[0], word) for word in words] + list(changed.values())


def check_run(name: str, work: Path) -> Result:
    """A training of RUNS: the number of metrics that are not finite."""
    training, changes, _ = RUNS[name]
    recipe, folder = TRAININGS[training], work / name.replace(" ", "_")
    inputs = work / recipe.inputs
    if not inputs.exists():
        inputs.mkdir()
        for command in recipe.make(inputs):
            run(command, ROOT, work / "make.log")
    run(on_gpu(recipe.train(inputs, folder), changes, torch.cuda.device_count()), ROOT, work / f"{folder.name}.log")
    metrics = read_metrics(folder)
    return Result(name, sum(not math.isfinite(v) for v in metrics.values()) if metrics else math.nan, "bad metrics", 0)


def measure(
    shape: str, sizes: dict, device: torch.device, length: int = LENGTH, steps: int = STEPS
) -> Iterator[Result]:
    """Tokens per second, MFU and peak memory of updates on one device, of a model of random weights."""
    config = Qwen2Config(**sizes, max_position_embeddings=2 * length)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, max_position_embeddings=2 * length))
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        del model
        engine, policy = make_engine(folder, device, "bfloat16"), get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=False)
    ids = torch.randint(5, 1000, (1, length))
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1, "responses": ids[:, 1:]}
    data = TensorDict(columns, batch_size=1)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        with engine.train_mode(), engine.autocast():
            log_probs, _ = policy.log_probs(engine.module, moved(data, device), temperature=1.0, with_entropy=False)
            engine.backward(-log_probs.mean(), is_last_micro_batch=True)
            engine.optimizer_step()  # reads the norm: the device is done
        seconds.append(time.perf_counter() - started)
    best = min(seconds)
    reached, peak = FlopsCounter(config).estimate_flops([length], best)
    yield Result(f"{shape}: throughput", length / best, "tokens/s")
    if math.isfinite(peak):
        yield Result(f"{shape}: MFU", reached / peak, "share")
    if device.type == "cuda":
        yield Result(f"{shape}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    dist.destroy_process_group()


CHECKS: tuple[Callable[[torch.device], Iterator[Result]], ...] = (check_attention, check_head, check_step)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    console = Console()
    if not torch.cuda.is_available():
        console.print("No GPU is here. On a machine with GPUs this command would run:")
        names = [check.__doc__.splitlines()[0] for check in CHECKS] + [f"Training: {name}." for name in RUNS]
        for name in [*names, *(f"Timing: a training step of a {shape} model, {LENGTH} tokens." for shape in SHAPES)]:
            console.print(f"  - {name}", highlight=False)
        return 0
    device, gpus = torch.device("cuda", 0), torch.cuda.device_count()
    results = [result for check in CHECKS for result in check(device)]
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    results += [check_run(name, work) for name, (_, _, needed) in RUNS.items() if needed <= gpus]
    for shape, sizes in SHAPES.items():
        width, inner = sizes["hidden_size"], sizes["intermediate_size"]
        weights = sizes["num_hidden_layers"] * width * (2 * width + 3 * inner) + 2 * width * sizes["vocab_size"]
        needed = 18 * weights  # float32 weights, gradients and moments, and a bfloat16 copy
        if needed < torch.cuda.get_device_properties(device).total_memory:
            results += measure(shape, sizes, device)
        else:
            console.print(f"{shape}: weights, gradients and AdamW's state need {needed / 2**30:.0f} GiB; left out")
    shutil.rmtree(work)
    table = Table("check", "value", "unit", "bound", title=f"{gpus} x {torch.cuda.get_device_name(device)}")
    for result in results:
        bound = "" if result.bound is None else f"at most {result.bound:g}: {'met' if result.holds else 'MISSED'}"
        table.add_row(result.name, f"{result.value:.4g}", result.unit, bound)
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
