"""Cost of a scorer's training step: the n samples of a prompt sharing one forward, against every prompt repeated."""

from __future__ import annotations

import random
import tempfile

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaModel

from benchmarks.harness import Row, alternate, ratios, row
from spd_scorer import AutoModelForSPDScoring, ScoringActor, ScoringModelConfig, SPDInputData
from verl.workers.policy.bernoulli import BernoulliPolicy

PROMPTS, N, GAMMA, VOCABULARY = 32, 8, 8, 512


def scorer() -> ScoringActor:
    """An `own` scorer of 4 layers and width 256."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512,
    )
    with tempfile.TemporaryDirectory() as directory:
        LlamaModel(config).save_pretrained(directory)
        return AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=directory, backbone="own"))


def prompts() -> TensorDict:
    """32 blocks whose inputs have 160 to 192 tokens."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(5, VOCABULARY) for _ in range(count)]

    lengths = [rng.randrange(160, 193) - 2 * GAMMA - 4 for _ in range(PROMPTS)]
    data = SPDInputData.from_blocks(
        [ids(k) for k in lengths], [ids(GAMMA) for _ in lengths], [ids(GAMMA + 1) for _ in lengths],
        sep_token_id=3, pad_token_id=0,
    )
    batch = TensorDict(data.as_kwargs(), batch_size=PROMPTS)
    batch["group_index"] = torch.arange(PROMPTS)
    return batch


def step(model: ScoringActor, batch: TensorDict, share: bool, advantages: torch.Tensor) -> list[torch.Tensor]:
    """Forward, sampling, old log-probs and backward of one step; gives the gradients."""
    policy = BernoulliPolicy(share=share)
    rows = batch[torch.arange(PROMPTS).repeat_interleave(N)]
    with torch.no_grad():
        z = policy.scores(model, batch if share else rows)
        z = z.repeat_interleave(N, 0) if share else z
        draws = torch.rand(z.shape, generator=torch.Generator().manual_seed(1))
        rows["responses"] = (draws < torch.sigmoid(z)).long()
        old, _ = policy.log_probs(model, rows, temperature=1.0, with_entropy=False)
    new, _ = policy.log_probs(model, rows, temperature=1.0, with_entropy=False)
    loss = -(torch.exp(new - old) * advantages[:, None]).mean()
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run() -> list[Row]:
    """spd_step_speedup, and the largest relative difference of the gradients."""
    model, batch = scorer(), prompts()
    advantages = torch.randn(PROMPTS * N, generator=torch.Generator().manual_seed(2))
    shared, repeated = (step(model, batch, share, advantages) for share in (True, False))
    apart = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
                for a, b in zip(shared, repeated, strict=True))
    seconds = alternate({
        "repeated": lambda: step(model, batch, False, advantages),
        "shared": lambda: step(model, batch, True, advantages),
    }, repetitions=5)
    return [
        row("spd_step_speedup", ratios(seconds["repeated"], seconds["shared"]), "times"),
        row("spd_step_shared", seconds["shared"], "s"),
        row("spd_step_repeated", seconds["repeated"], "s"),
        row("spd_step_gradient_difference", [apart], "relative"),
    ]
