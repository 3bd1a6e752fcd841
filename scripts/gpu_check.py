"""Runs what is special on GPUs against the CPU reference, then measures: python scripts/gpu_check.py [--json FILE].

Attention kernels, the output head and losses in bfloat16 are compared with float32 on the CPU. Trainings
(scripts/gpu_runs.py) run for a few steps: updates on several GPUs, in bfloat16, with split layers and sequences must
have the loss and gradient norm of one GPU in float32. Then training steps of models of random weights are timed. A
check that fails does not end the others. Without a GPU it says what it would do.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from scripts.gpu_runs import DEMOS, LIMIT_S, RUNS, Result, described, left_out, run_demo, run_row
from scripts.loss_compare import ROOT, run
from verl.config.common import CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.training.engine import FSDPEngine
from verl.training.flops_counter import FlopsCounter
from verl.training.policy import get_policy
from verl.training.policy.attention import BACKENDS
from verl.training.policy.chunked_log_probs import FinalLogits, chunked_log_probs
from verl.training.policy.packing import pack, to_device
from verl.training.policy.prefix_tree import prefix_tree
from verl.utils.distributed import ensure_process_group, host_barrier, initialize_global_process_group
from verl.utils.fs import output_file

#: shapes of Qwen2.5-0.5B and -7B
SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064),
}  # fmt: skip
LENGTH, STEPS = 4096, 5


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
    for shared, (window, cap) in product((False, True), ((None, None), (7, None), (7, 1.0))):
        backends = {"sdpa": True, "varlen": on_cuda and cap is None,
                    "flash_attn": on_cuda and find_spec("flash_attn") is not None,
                    "shared_prompt": on_cuda and shared and window is None}  # fmt: skip
        tree = prefix_tree(data, 24) if shared else None
        here, there = (pack(data["attention_mask"], 24, tree, device=d) for d in ("cpu", device))
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
            output = backend(*inputs, packing, 0.125, 0.0, window, cap)
            (output.float() * weights.to(output.device)).sum().backward()
            results[name] = [output, *(x.grad for x in inputs)]
        reference = results.pop("reference")
        for name, got in results.items():
            kind = "shared prompts" if shared else "separate rows"
            kind += ", a window" * (window is not None) + ", a soft cap" * (cap is not None)
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
                data = to_device(batch(), engine.device)
                log_probs, _ = policy.log_probs(engine.module, data, temperature=1.0, with_entropy=False)
                engine.backward(log_probs.mean(), is_last_micro_batch=True)
                norm = engine.optimizer_step().grad_norm
            results.append([log_probs, torch.tensor([norm])])
            dist.destroy_process_group()
    yield Result("update in bfloat16", relative(results[1], results[0]), "relative", 3e-2)


def make_model(sizes: dict, folder: Path, device: torch.device, length: int) -> None:
    """Write a model of random weights in bfloat16, with positions for `length` tokens."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, max_position_embeddings=2 * length))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    shape: str, sizes: dict, device: torch.device, folder: Path, length: int = LENGTH, steps: int = STEPS
) -> Iterator[Result]:
    """Tokens per second, MFU and peak memory of updates, a sequence on each rank, of a model of random weights.

    All ranks of the process group take part (without one, this process alone); they write the model to `folder`.
    """
    ensure_process_group(device.type)
    ranks, config = dist.get_world_size(), Qwen2Config(**sizes, max_position_embeddings=2 * length)
    if dist.get_rank() == 0:
        make_model(sizes, folder, device, length)
    host_barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # that of writing the model
    engine, policy = make_engine(str(folder), device, "bfloat16"), get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=False)
    ids = torch.randint(5, 1000, (1, length))
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1, "responses": ids[:, 1:]}
    data = TensorDict(columns, batch_size=1)
    seconds = []
    for _ in range(steps):
        host_barrier()
        started = time.perf_counter()
        with engine.train_mode(), engine.autocast():
            log_probs, _ = policy.log_probs(engine.module, to_device(data, device), temperature=1.0, with_entropy=False)
            engine.backward(-log_probs.mean(), is_last_micro_batch=True)
            engine.optimizer_step()  # reads the norm: the device is done
        seconds.append(time.perf_counter() - started)
    best = min(seconds)
    reached, peak = FlopsCounter(config).estimate_flops([length] * ranks, best)
    name = f"{shape} on {ranks} rank{'s' if ranks > 1 else ''}"
    yield Result(f"{name}: throughput", ranks * length / best, "tokens/s")
    if math.isfinite(peak):
        yield Result(f"{name}: MFU", reached / peak / ranks, "share")
    if device.type == "cuda":
        used = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        yield Result(f"{name}: peak memory of a GPU", used.item(), "GiB")
    dist.destroy_process_group()


def bytes_a_rank(sizes: dict, ranks: int) -> float:
    """Bytes of float32 weights, gradients and moments, and of a bfloat16 copy, on one of `ranks` that share them."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    weights = sizes["num_hidden_layers"] * width * (2 * width + 3 * inner) + 2 * width * sizes["vocab_size"]
    return 18 * weights / ranks


def timings(gpus: int) -> list[tuple[str, int]]:
    """(shape, ranks) of the measurements on a machine with `gpus` GPUs."""
    return [("0.5B", 1), *([("0.5B", gpus)] if gpus > 1 else []), ("7B", gpus)]


def measure_together(shape: str, ranks: int, work: Path) -> Iterator[Result]:
    """`measure` on `ranks` GPUs, in processes of torchrun."""
    folder = work / f"{shape}-{ranks}"
    folder.mkdir()
    file = folder / "results.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = ["-m", "scripts.gpu_check", "--measure", shape, "--json", str(file)]
    try:
        run([*launcher, *command], ROOT, work / f"{folder.name}.log", LIMIT_S)
        yield from (Result(**fields) for fields in json.loads(file.read_text()))
    finally:
        shutil.rmtree(folder)  # 15 GB of 7B weights


def measure_here(shape: str, file: Path) -> None:
    """One rank of `measure_together`; rank 0 writes the results to `file`."""
    _, rank, _ = initialize_global_process_group()
    device = torch.device("cuda", torch.cuda.current_device())
    results = list(measure(shape, SHAPES[shape], device, file.parent / "model"))
    if rank == 0:
        write_json(results, file)


CHECKS: tuple[Callable[[torch.device], Iterator[Result]], ...] = (check_attention, check_head, check_step)


def attempt(name: str, results: Callable[[], Iterable[Result]]) -> Iterator[Result]:
    """The results; what ends them, an exit included, is a result that failed."""
    try:
        yield from results()
    except (Exception, SystemExit) as error:
        yield Result(name, math.nan, "", message=f"{type(error).__name__}: {error}"[-4000:])
        if dist.is_initialized():
            dist.destroy_process_group()


def write_json(results: Iterable[Result], file: Path) -> None:
    """Write results as a list of objects; NaN, which JSON lacks, is null."""
    rows = [asdict(result) for result in results]
    rows = [row | {"value": row["value"] if math.isfinite(row["value"]) else None} for row in rows]
    file.write_text(json.dumps(rows, indent=1) + "\n")


def print_results(results: Sequence[Result], console: Console, title: str) -> None:
    """A table, and below it why checks could not be done."""
    table = Table("check", "value", "unit", "bound", title=title)
    for result in results:
        bound = "" if result.bound is None else f"at most {result.bound:g}: {'met' if result.holds else 'MISSED'}"
        table.add_row(result.name, f"{result.value:.4g}", result.unit, "FAILED" if result.message else bound)
    console.print(table)
    for result in results:
        if result.message:
            console.print(f"{result.name} failed: {result.message}", markup=False, highlight=False)


def check_all(gpus: int, device: torch.device, console: Console, model: Path | None) -> Iterator[Result]:
    """Checks, trainings and measurements of a machine with `gpus` GPUs, each whatever happened to the others.

    `model`: that of the demos of examples/pretrained, which are left out without one.
    """
    for check in CHECKS:
        yield from attempt(check.__name__, lambda check=check: check(device))
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    for name, row in RUNS.items():
        if reason := left_out(row, gpus):
            console.print(f"{name}: left out, it {reason}", highlight=False)
            continue
        console.print(f"{name} ...", highlight=False)
        yield from attempt(name, lambda name=name: run_row(name, work, gpus))
    for demo, title in DEMOS.items():
        if model is None:
            console.print(f"{title}: left out, name a model with --model (make gpu-check MODEL=DIR)", highlight=False)
            continue
        questions = [ROOT / "outputs" / "gsm8k" / name for name in ("train.jsonl", "test.jsonl")]
        if demo == "gsm8k.demo" and not all(file.is_file() for file in questions):
            console.print(f"{title}: left out, it needs train.jsonl and test.jsonl in outputs/gsm8k", highlight=False)
            continue
        console.print(f"{title} ...", highlight=False)
        yield from attempt(title, lambda demo=demo: run_demo(demo, model, work))
    memory = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    for shape, ranks in timings(gpus):
        if (needed := bytes_a_rank(SHAPES[shape], ranks)) < memory:
            yield from attempt(f"{shape} on {ranks}", lambda at=(shape, ranks): measure_together(*at, work))
        else:
            console.print(f"{shape}: weights, gradients and AdamW's state need {needed / 2**30:.0f} GiB; left out")
    console.print(f"Logs of the trainings: {work}")


def has_gpus() -> bool:
    """Whether nvidia-smi lists GPUs, whatever PyTorch says."""
    if shutil.which("nvidia-smi") is None:
        return False
    return "GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a check failed or a bound is not kept, or if PyTorch cannot use this machine's GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, help="file for the figures")
    parser.add_argument("--model", type=Path, help="Hugging Face folder for the demos of examples/pretrained")
    parser.add_argument("--measure", choices=SHAPES, help="time this shape alone, on the ranks of torchrun")
    arguments = parser.parse_args(argv)
    console = Console()
    if not torch.cuda.is_available():
        if has_gpus():
            console.print(f"nvidia-smi lists GPUs, but torch {torch.__version__} cannot use them. Run `make env`, or "
                          "install PyTorch for CUDA.", highlight=False)  # fmt: skip
            return 1
        console.print("No GPU is here. On a machine with GPUs this command would run:")
        names = [check.__doc__.splitlines()[0] for check in CHECKS] + list(described(RUNS))
        timed = (f"Timing: training steps of a {shape} model, {LENGTH} tokens a GPU." for shape in SHAPES)
        demos = (f"Training: {title} (with --model)." for title in DEMOS.values())
        for name in [*names, *demos, *timed]:
            console.print(f"  - {name}", highlight=False)
        return 0
    if arguments.measure:
        measure_here(arguments.measure, arguments.json)
        return 0
    device, gpus = torch.device("cuda", 0), torch.cuda.device_count()
    results: list[Result] = []
    try:
        for result in check_all(gpus, device, console, arguments.model):
            results.append(result)
            if arguments.json is not None:
                write_json(results, arguments.json)
    finally:  # Ctrl-C too
        print_results(results, console, f"{gpus} x {torch.cuda.get_device_name(device)}")
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
