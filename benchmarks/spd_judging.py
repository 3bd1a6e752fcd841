"""Cost of judging a drafted block, compared with the target's forward that verifies it."""

import random
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, ratios, row
from benchmarks.spd_step import GAMMA, PAD_ID, PROMPTS, SEP_ID, VOCABULARY, contexts, model_config
from benchmarks.spd_step import scorer as own_scorer
from recipe.spd.data.blocks import Block, Judge
from recipe.spd.rollout.decoder import speculative_generate
from scripts.spd_evaluation import rules
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig

ROUNDS = 16  # the first one warms up


class TimedDecoding:
    """Times the verification forward of each round and every judge on the same block, then rejects it.

    The prefill calls the model below the output layer, so that hooks on the whole model see verification alone.
    """

    def __init__(self, target: nn.Module, judges: dict[str, Judge]):
        self.judges = judges
        self.seconds: dict[str, list[float]] = {name: [] for name in ("forward", *judges)}
        target.register_forward_pre_hook(self._begins)
        target.register_forward_hook(self._ends)

    def _begins(self, *call: object) -> None:
        self.began = time.perf_counter()

    def _ends(self, *call: object) -> None:
        self.forward = time.perf_counter() - self.began

    def __call__(self, block: Block) -> torch.Tensor:
        if len(block.rows) == PROMPTS:  # later rounds lack the rows that a chance match has brought to the limit
            self.seconds["forward"].append(self.forward)
            for name, judge in self.judges.items():
                began = time.perf_counter()
                judge(block)
                self.seconds[name].append(time.perf_counter() - began)
        return torch.zeros_like(block.mismatch)


def causal_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A random model: what a forward costs does not depend on what it says."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def run() -> list[Row]:
    """Shares of the verification forward, one value a round of one decoding of 32 contexts."""
    target = causal_model(model_config(), seed=0)
    draft = causal_model(LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=512), seed=1)
    head = AutoModelForSPDScoring.from_config(ScoringModelConfig(backbone="target"), base_model=target)
    tokens = {"sep_token_id": SEP_ID, "pad_token_id": PAD_ID, "end_ids": frozenset()}
    judges = {"own": rules.scorer(own_scorer().eval(), 0.0, **tokens), "target": rules.scorer(head.eval(), 0.0)}
    timed = TimedDecoding(target, judges)
    speculative_generate(target, draft, contexts(random.Random(0)), timed, gamma=GAMMA, max_new_tokens=ROUNDS,
                         eos_token_id=None, batch_size=PROMPTS)
    seconds = {name: values[1:] for name, values in timed.seconds.items()}
    return [
        *(row(f"judge_cost_{name}", ratios(seconds[name], seconds["forward"]), "of a verification forward")
          for name in judges),
        row("judge_verification_forward", [1000 * s for s in seconds["forward"]], "ms"),
    ]
