"""Whether rollouts with drafts sample from the policy: chi-squared over all answers of a toy model."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, row
from benchmarks.rl_rollout import engine_of, one_rank
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.training.engine.fsdp import FSDPEngine
from verl.training.policy import get_policy

WORDS, LENGTH, PROMPT = 8, 3, (5, 6, 7, 5, 6, 7)
SAMPLES, TEMPERATURE, LENIENCE = 4000, 0.7, 3.0
LEAST_EXPECTED = 5  # answers that are expected less often share a cell
REFINE = {"window": 3, "noise_token_id": 3}
VLLM = {"name": "vllm", "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 2**28}}}


def rollouts(draft: Path) -> dict[str, dict[str, Any]]:
    """Settings by name; `lenient` does not sample from the policy: its p-value shows that the test would see it."""
    lenient = {"mode": "verify", "lenience": LENIENCE}
    return {
        "refine_slide": {"name": "refine", "custom": REFINE | {"mode": "slide"}},
        "refine_verify": {"name": "refine", "custom": REFINE | {"mode": "verify"}},
        "lenient": {"name": "refine", "custom": REFINE | lenient, "calculate_log_probs": True},
        "vllm_draft": VLLM
        | {"speculative": SpeculativeConfig(method="draft_model", draft_path=str(draft), num_tokens=2)},
        "vllm_ngram": VLLM | {"speculative": SpeculativeConfig(method="ngram", num_tokens=2)},
    }


def save_toy(folder: Path, seed: int, change: float = 0.0, tied: bool = False) -> str:
    """A random model of 8 words with uneven probabilities, and heads of the width that vLLM has CPU kernels for.

    With `change`, a model that resembles it: that share of the weights' spread is added as noise.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        dtype="float32", tie_word_embeddings=tied,
    ))  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.add_(change * weight.std() * torch.randn_like(weight)).mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


def request(n: int, **meta: Any) -> DataProto:
    """The prompt, for n samples."""
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1},
        meta_info={"n": n, "eos_token_id": None, "pad_token_id": 0, "do_sample": True, "global_steps": 1} | meta,
    )


def answer_log_probs(engine: FSDPEngine, temperature: float) -> torch.Tensor:
    """[8^3, 3]: log-probs of the tokens of every answer, which are numbered in base 8."""
    answers = torch.cartesian_prod(*[torch.arange(WORDS)] * LENGTH)
    with torch.no_grad(), engine.eval_mode():
        rows = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], 1)
        logits = engine.module(input_ids=rows).logits[:, -LENGTH - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def numbers_of(responses: torch.Tensor) -> torch.Tensor:
    """Answers [N, 3] -> their numbers [N]."""
    return responses @ torch.tensor([WORDS**2, WORDS, 1])


def p_value(numbers: torch.Tensor, log_probs: torch.Tensor) -> float:
    """Of Pearson's chi-squared test that answers [N] have these log-probs [8^3, 3]."""
    expected = len(numbers) * log_probs.double().sum(-1).exp()
    seen = torch.bincount(numbers, minlength=len(expected)).double()
    common = expected >= LEAST_EXPECTED
    if not common.all():
        expected, seen = (torch.cat([part[common], part[~common].sum()[None]]) for part in (expected, seen))
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


def run() -> list[Row]:
    """p-value and tokens per forward of each rollout."""
    rows, opened = [], []
    with one_rank() as folder:
        engine = engine_of(Path(save_toy(folder / "model", 0)))
        log_probs = answer_log_probs(engine, TEMPERATURE)
        for name, settings in rollouts(Path(save_toy(folder / "draft", 0, change=0.2))).items():
            config = RolloutConfig(**{"mode": "sync", "prompt_length": len(PROMPT), "response_length": LENGTH,
                                      "dtype": "float32", "ignore_eos": True} | settings)  # fmt: skip
            made = get_rollout_class(config.name, "sync")(config, engine.model_config, engine.mesh)
            opened.append(made)
            made.bind_actor(engine, get_policy("causal_lm"))
            made.update_weights(engine.get_per_tensor_param())
            answers = made.generate_sequences(request(SAMPLES, temperature=TEMPERATURE))
            value = p_value(numbers_of(answers.batch["responses"]), log_probs)
            tokens = answers.meta_info["metrics"]["rollout/tokens_per_forward"]
            rows.append(row(f"p_value_{name}", [value], f"p-value, {SAMPLES} answers"))
            rows.append(row(f"toy_tokens_per_forward_{name}", tokens, "tokens per forward"))
        for made in opened:  # only now: vLLM's end takes the process group with it
            made.close()
    return rows
