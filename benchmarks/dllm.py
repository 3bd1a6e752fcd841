"""Iterative refinement: memory and gradients of the rounds, shared instructions, the cache in generation."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, exact_peaks, ratios, resident_bytes, restart_peak, row, say
from dllm_reasoning.config import IterativeConfig
from dllm_reasoning.inference.generator import iterative_generate
from dllm_reasoning.losses.iterative_loss import IterativeLoss
from dllm_reasoning.losses.layouts import Layout, build_layout

VOCABULARY, EOS, PAD = 1024, 2, 0
INSTRUCTION, RESPONSE, ROWS = 512, 128, 4  # the instruction is 4 times the response
MEMORY_SHAPE = (64, 448, 4)  # instruction, response, rows
NEW_TOKENS, REPETITIONS = 512, 5
DEMO_MODEL = Path(os.environ.get("DLLM_MODEL", "outputs/dllm/refined"))  # what `make demo-dllm` leaves
WALL_PROMPTS = 60


def model() -> LlamaForCausalLM:
    """4 layers of width 256."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=1,
    ))  # fmt: skip


def layout(instruction: int, response: int, rows: int, *, split: bool) -> Layout:
    """Rows of these lengths under iid noise."""
    generator = torch.Generator().manual_seed(1)
    width = instruction + response
    ids = torch.randint(5, VOCABULARY, (rows, width), generator=generator)
    ids[:, -1] = EOS
    positions = torch.arange(width).expand(rows, -1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions,
             "response_mask": (positions >= instruction).long()}  # fmt: skip
    noise = IterativeConfig(block_length=8)
    return build_layout(batch, list(range(rows)), noise, EOS, split=split)


class Rounds:
    """Forward and backward of K rounds one way, into gradients that are there before, as after a first micro-batch."""

    def __init__(self, made: LlamaForCausalLM, data: Layout, rounds: int, *, share: bool, summed: bool = False):
        self.model, self.data, self.summed = made, data, summed
        self.loss = IterativeLoss([1.0] * rounds, 0.0, share=share)

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=False)
        held: list[torch.Tensor] = []
        scale = 1 / self.data.tail.count()
        self.loss.run(self.model, self.data, lambda loss, last: held.append(loss) if self.summed else loss.backward(),
                      scale=scale, ar_scale=scale)  # fmt: skip
        if held:
            sum(held).backward()

    def gradients(self) -> list[torch.Tensor]:
        self()
        return [p.grad.clone() for p in self.model.parameters()]


def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Largest absolute difference."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def peak(work: Callable[[], None]) -> int:
    """Bytes that the work takes above what is held before it (weights and their gradients)."""
    gc.collect()
    restart_peak()
    before = resident_bytes()
    work()
    return resident_bytes(peak=True) - before


def memory_rows(made: LlamaForCausalLM) -> list[Row]:
    """Peak of 4 rounds over that of 1: a backward pass each round, and the summed graph."""
    data = layout(*MEMORY_SHAPE, split=False)
    ways = {name: Rounds(made, data, k, share=False, summed=summed) for name, k, summed in
            (("one", 1, False), ("four", 4, False), ("one_summed", 1, True), ("four_summed", 4, True))}  # fmt: skip
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    with exact_peaks():
        for _ in range(REPETITIONS):
            for name, work in ways.items():
                peaks[name].append(float(peak(work)))
    difference = furthest(ways["four"].gradients(), ways["four_summed"].gradients())
    return [
        row("memory_k4_over_k1", ratios(peaks["four"], peaks["one"]), "peak of 4 rounds / of 1"),
        row("memory_k4_over_k1_summed", ratios(peaks["four_summed"], peaks["one_summed"]), "the same, summed graph"),
        row("round_gradient_difference", [difference], "absolute, per round / summed"),
    ]


def sharing_rows(made: LlamaForCausalLM) -> list[Row]:
    """Speed of rounds that share the instruction over rounds that repeat it, and the gradients' distance."""
    results = []
    whole, split = (layout(INSTRUCTION, RESPONSE, ROWS, split=s) for s in (False, True))
    for k in (2, 4):
        plain, shared = Rounds(made, whole, k, share=False), Rounds(made, split, k, share=True)
        seconds = alternate({"plain": plain, "shared": shared}, REPETITIONS)
        speedup = ratios(seconds["plain"], seconds["shared"])
        results.append(row(f"kv_share_speedup_k{k}", speedup, f"times, instruction {INSTRUCTION}, response {RESPONSE}"))
        difference = furthest(plain.gradients(), shared.gradients())
        results.append(row(f"kv_share_gradient_difference_k{k}", [difference], "absolute"))
    return results


def generation_rows(made: LlamaForCausalLM) -> list[Row]:
    """512 tokens in blocks, with the cache and without."""
    prompt = [list(range(10, 42))]

    def generate(use_cache: bool) -> None:
        # No token ends the text: each run writes all of its tokens.
        iterative_generate(made, prompt, VOCABULARY, PAD, 7, 1, NEW_TOKENS, use_cache=use_cache, noise_token_id=EOS)

    ways = {"cached": lambda: generate(True), "whole": lambda: generate(False)}
    seconds = alternate(ways)
    rows = [
        row("generation_cache_speedup", ratios(seconds["whole"], seconds["cached"]), "times, 512 tokens"),
        row("generation_cached", seconds["cached"], "s, 512 tokens"),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = alternate(ways, 3)
    finally:
        torch.set_num_threads(threads)
    return [*rows, row("generation_cache_speedup_one_thread", ratios(seconds["whole"], seconds["cached"]), "times")]


def wall_rows() -> list[Row]:
    """Lossless generation of the demo's model against Hugging Face's greedy generate, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.dllm_arithmetic.corpus import draw

    made, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval(), AutoTokenizer.from_pretrained(DEMO_MODEL)
    questions = draw({"train": 0, "val": 0, "test": WALL_PROMPTS}, seed=99)["test"]["instruction"]
    prompts = [tokenizer(q, add_special_tokens=False)["input_ids"] for q in questions]
    eos, pad, results = tokenizer.eos_token_id, tokenizer.pad_token_id, {}

    def greedy() -> None:
        results["greedy"] = [
            made.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.int64), do_sample=False,
                          max_new_tokens=128, pad_token_id=pad)[0, len(p) :].tolist() for p in prompts
        ]  # fmt: skip

    def lossless(mode: str) -> None:
        options = {"refine_iter": mode, "max_new_tokens": 128, "return_details": True}
        results[mode] = [iterative_generate(made, [p], eos, pad, **options).tokens[0] for p in prompts]

    modes = ("slide", "verify")
    seconds = alternate({"greedy": greedy, **{m: lambda m=m: lossless(m) for m in modes}}, 3)
    same = [float(results[m] == results["greedy"]) for m in modes]
    speed = {m: ratios(seconds["greedy"], seconds[m]) for m in modes}
    best = max(modes, key=lambda m: sorted(speed[m])[1])
    return [
        row("lossless_wall_speedup", speed[best], f"times, greedy generate / {best}"),
        *(row(f"lossless_wall_speedup_{m}", speed[m], "times") for m in modes),
        row("lossless_wall_same_tokens", same, "share of modes"),
    ]


def run() -> list[Row]:
    """All rows; the wall time only where the demo has left its model."""
    made = model()
    rows: list[Row] = []
    for measure in (memory_rows, sharing_rows, generation_rows):
        say(measure.__doc__)
        rows += measure(made)
    if not DEMO_MODEL.is_dir():
        say(f"no model in {DEMO_MODEL} (make demo-dllm leaves one): lossless_wall_speedup is left out")
        return rows
    say(wall_rows.__doc__)
    return rows + wall_rows()
