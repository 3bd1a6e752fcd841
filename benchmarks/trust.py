"""Ratios before the first update, and log-probs that depend on the batch.

With the pretrained model of `make demo-pretrained` (outputs/pretrained/model) on one CPU rank. One part alone, whose
rows replace those in benchmarks/results/trust.json: `python -m benchmarks.trust PART ...`, of PARTS.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, alternate, row, save, say
from benchmarks.harness import ratios as ratios_of
from benchmarks.rl_rollout import PROMPT, engine_of, one_rank, rollout_of
from tests.helpers.ranks import run_ranks
from verl.config.actor import FSDPActorConfig
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK
from verl.trainer.ppo.turn_rows import to_rows
from verl.training.actor import DataParallelPPOActor
from verl.training.engine.fsdp import FSDPEngine
from verl.training.policy import get_policy

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "outputs" / "pretrained" / "model"
PROMPTS, SAMPLES = 8, 4
REPETITIONS = 5
CUTS: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1}, {"micro_batch_size": 5}, {"micro_batch_size": 32},
    {"use_dynamic_bsz": True, "max_token_len": 400},
)  # fmt: skip
QUESTION = "Question {}: a box holds {} red and {} blue balls. How many balls does it hold? Answer:"


def questions(engine: FSDPEngine, samples: int = SAMPLES) -> DataProto:
    """PROMPTS left-padded prompts [B, PROMPT] of unlike lengths, `samples` answers each at temperature 1."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [QUESTION.format(i, 10**i, i + 2) for i in range(PROMPTS)]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    coded = tokenizer(texts, padding="max_length", max_length=PROMPT, padding_side="left", return_tensors="pt")
    mask = coded["attention_mask"]
    columns = {"input_ids": coded["input_ids"], "attention_mask": mask,
               "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}  # fmt: skip
    meta = {"n": samples, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
            "do_sample": True, "temperature": 1.0, "global_steps": 1}  # fmt: skip
    return DataProto.from_dict(columns, meta_info=meta)


def actor_of(engine: FSDPEngine, **config: Any) -> DataParallelPPOActor:
    """An actor whose forward takes 8 samples at a time."""
    settings = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8, "rollout_n": 1, **config}
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=False, share_prompt=False)
    return DataParallelPPOActor(FSDPActorConfig(**settings), engine, policy)


def ratio_errors(name: str, suffix: str, **filters: Any) -> list[Row]:
    """Largest |trainer's probability / rollout's - 1| of a sampled token, with and without the sampling mask."""
    engine = engine_of(MODEL)
    settings = {"calculate_log_probs": True, "ignore_eos": False}
    rollout = rollout_of(name, engine, **settings, **filters)
    if name == "vllm":
        rollout.update_weights(engine.get_per_tensor_param())
    asked = questions(engine)
    samples = rollout.generate_sequences(asked)
    samples.meta_info["temperature"] = 1.0
    actor, mask = actor_of(engine), samples.batch["response_mask"].bool()
    kept = samples.non_tensor_batch[SAMPLING_MASK]
    sizes = [(len(ids) - 1 - ids[0]) / max(1, ids[0]) for ids in kept]
    rows = []
    for title in (f"first_ratio_error_{suffix}", f"first_ratio_error_{suffix}_biased"):
        log_probs, _ = actor.compute_log_prob(to_rows(samples))
        ratios = (log_probs - samples.batch["rollout_log_probs"])[mask].double().exp()
        unit = f"largest |ratio - 1| of {int(mask.sum())} tokens; mean ratio {ratios.mean():.4f}; {filters}"
        rows.append(row(title, [(ratios - 1).abs().max().item()], unit))
        samples.non_tensor_batch.pop(SAMPLING_MASK, None)
    rows.append(row(f"kept_tokens_{suffix}", sizes, "kept tokens a position, mean of a sample"))
    if name == "hf":
        samples.non_tensor_batch[SAMPLING_MASK] = kept
        without = DataProto(samples.batch, {}, samples.meta_info)
        plain = rollout_of(name, engine, **settings, **filters, record_sampling_mask=False)
        works = {
            "generate": partial(rollout.generate_sequences, asked),
            "generate_plain": partial(plain.generate_sequences, asked),
            "log_probs": lambda: actor.compute_log_prob(to_rows(samples)),
            "log_probs_plain": lambda: actor.compute_log_prob(to_rows(without)),
        }
        seconds = alternate(works, REPETITIONS)
        for part in ("generate", "log_probs"):
            shares = ratios_of(seconds[part], seconds[f"{part}_plain"])
            rows.append(row(f"sampling_mask_cost_{part}", shares, "times, with the mask / without"))
    else:
        rollout.close()
    return rows


def micro_batches() -> list[Row]:
    """Largest difference of a token's log-prob over micro-batch sizes, packing, dynamic batches and ranks, by type."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(MODEL, dtype)
        rollout = rollout_of("hf", engine, ignore_eos=False)
        # bfloat16 is many times slower on CPUs that have no instructions for it.
        samples = rollout.generate_sequences(questions(engine, SAMPLES if dtype == "float32" else 1))
        samples.meta_info["temperature"] = 1.0
        mask, suffix = samples.batch["response_mask"].bool(), "" if dtype == "float32" else "_bfloat16"

        def computed(actor: DataParallelPPOActor, cut: dict[str, Any], samples: DataProto = samples) -> torch.Tensor:
            samples.meta_info = {"temperature": 1.0, **cut}
            return actor.compute_log_prob(to_rows(samples))[0]

        actor, results = actor_of(engine), []
        for packed in (False, True):
            actor.policy.remove_padding = packed  # the actor has compared the layouts
            results += [computed(actor, cut)[mask] for cut in CUTS]
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/samples"
            samples.save_to_disk(file)
            halves = run_ranks(log_probs_on_rank, 2, file, dtype)
        results.append(torch.from_numpy(np.concatenate(halves))[mask])
        table = torch.stack(results).double()  # [ways, tokens]
        spread = (table.amax(0) - table.amin(0)).max().item()
        ratios = (table - table[:1]).exp()
        outside = ((ratios < 0.99) | (ratios > 1.01)).double().mean().item()
        unit = f"{len(table)} ways, {table.shape[1]} tokens"
        rows.append(row(f"microbatch_logprob_diff{suffix}", [spread], unit))
        rows.append(row(f"microbatch_ratio_outside{suffix}", [outside], "share of tokens outside 0.99-1.01"))
    return rows


def log_probs_on_rank(rank: int, ranks: int, file: str, dtype: str) -> np.ndarray:
    """Log-probs [B / ranks, R] of this rank's share of the samples in `file`, on weights that the ranks share."""
    actor = actor_of(engine_of(MODEL, dtype))
    share = DataProto.load_from_disk(file).chunk(ranks)[rank]
    share.meta_info = {"temperature": 1.0, **CUTS[1]}
    return actor.compute_log_prob(to_rows(share))[0].numpy()


# One process group a part, which an engine's end takes with it.
PARTS: dict[str, Callable[[], Row | list[Row]]] = {
    "micro_batches": micro_batches, "hf": partial(ratio_errors, "hf", "top_p", top_p=0.9),
    "vllm": partial(ratio_errors, "vllm", "top_p_vllm", top_p=0.9, top_k=100),
}  # fmt: skip


def run(parts: Sequence[str] = tuple(PARTS)) -> list[Row]:
    """The rows of these parts."""
    if not (MODEL / "config.json").exists():
        raise FileNotFoundError(f"{MODEL} holds no model: run make demo-pretrained first")
    rows: list[Row] = []
    for part in parts:
        say(part)
        with one_rank():
            made = PARTS[part]()
        rows += made if isinstance(made, list) else [made]
    return rows


if __name__ == "__main__":
    from benchmarks.run import WANTED

    for name in sys.argv[1:] or PARTS:
        save("trust", run([name]), WANTED, alone=True)
