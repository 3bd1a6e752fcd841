"""Log-probs of response tokens in chunks of the vocabulary's logits, against logits held whole."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, ratios, resident_bytes, restart_peak, row
from verl.workers.policy.causal_lm import _response_log_probs

TOKENS, VOCABULARY, HIDDEN, CHUNK = 4096, 128_000, 1024, 1024
REPETITIONS = 5


class OnlyStates(nn.Module):
    """A decoder that hands over given states: what is measured is the output matrix, not the layers below."""

    def __init__(self, states: torch.Tensor):
        super().__init__()
        self.states = states

    def forward(self, **inputs):
        return type("Output", (), {"last_hidden_state": self.states})()


def model() -> LlamaForCausalLM:
    """No layer is computed; the output matrix is 128,000 x 1,024 in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=16, num_key_value_heads=16)  # fmt: skip
    made = LlamaForCausalLM(config)
    made.model = OnlyStates(torch.randn(1, TOKENS + 1, HIDDEN, requires_grad=True))
    return made


def chunked(made: LlamaForCausalLM, labels: torch.Tensor) -> None:
    """As the policy does it, with entropy."""
    ones = torch.ones(1, TOKENS + 1, dtype=torch.int64)
    log_probs, entropy = _response_log_probs(
        made, input_ids=ones, attention_mask=ones, position_ids=ones, responses=labels, temperature=1.0,
        with_entropy=False, chunk_tokens=CHUNK,
    )  # fmt: skip
    (log_probs.mean() + entropy.mean()).backward()


def whole(made: LlamaForCausalLM, labels: torch.Tensor) -> None:
    """All logits at once: [4096, 128000] float32 are 2 GiB, and as much again for each tensor of that shape."""
    logits = made.lm_head(made.model.states[:, :-1])
    log_probs = torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_probs.mean().backward()


def run() -> list[Row]:
    """Time and peak memory above weights and their gradients, chunked over whole."""
    made, peaks = model(), {"chunked": [], "whole": []}
    labels = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def measured(name: str, work) -> None:
        made.lm_head.weight.grad = torch.zeros_like(made.lm_head.weight)  # gradients are there in both
        made.model.states.grad = torch.zeros_like(made.model.states)
        restart_peak()
        before = resident_bytes()
        work(made, labels)
        peaks[name].append(resident_bytes(peak=True) - before)

    ways = {"chunked": lambda: measured("chunked", chunked), "whole": lambda: measured("whole", whole)}
    seconds = alternate(ways, REPETITIONS)
    return [
        row("logprob_memory_ratio", ratios(peaks["chunked"][1:], peaks["whole"][1:]), "chunked / whole"),
        row("logprob_time_ratio", ratios(seconds["chunked"], seconds["whole"]), "chunked / whole"),
        row("logprob_chunked", seconds["chunked"], "s"),
        row("logprob_memory_chunked", [peak / 2**20 for peak in peaks["chunked"][1:]], "MiB, peak"),
    ]
