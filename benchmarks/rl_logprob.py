"""Log-probs of response tokens by the policy, a few tokens' logits at a time, against logits held in full."""

from functools import partial

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, ratios, resident_bytes, restart_peak, row
from verl.training.policy.causal_lm import CausalLMPolicy

TOKENS, VOCABULARY, HIDDEN = 4096, 128_000, 1024
REPETITIONS = 5


def model() -> LlamaForCausalLM:
    """Embedding, norm and output matrix in float32, no layer between: what is measured is the output matrix.

    The embedding is frozen, else both ways would hold its gradient, as large as the output matrix, too.
    """
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=0,
                                        num_attention_heads=16, max_position_embeddings=TOKENS + 1))  # fmt: skip
    made.get_input_embeddings().requires_grad_(False)
    return made


def batch() -> TensorDict:
    """One row: a prompt of one token, an answer of TOKENS."""
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
               "position_ids": torch.arange(TOKENS + 1)[None], "responses": ids[:, 1:]}  # fmt: skip
    return TensorDict(tensors, batch_size=1)


def chunked(made: LlamaForCausalLM, data: TensorDict) -> None:
    """As the policy does it by default."""
    log_probs, _ = CausalLMPolicy().log_probs(made, data, temperature=1.0, with_entropy=False)
    log_probs.mean().backward()


def whole(made: LlamaForCausalLM, data: TensorDict) -> None:
    """All logits at once: [4096, 128000] float32 are 2 GiB, and as much again for each tensor of that shape."""
    inputs = {key: data[key] for key in ("input_ids", "attention_mask", "position_ids")}
    states = made.get_decoder()(**inputs, use_cache=False).last_hidden_state[:, :-1]
    log_probs = torch.log_softmax(made.lm_head(states), -1).gather(-1, data["responses"][..., None])
    log_probs.mean().backward()


class Measured:
    """One way's forward and backward; keeps the peak memory of each call, less weights and gradients.

    `added`: the gradients are added to those of the call before, as in an update of several micro-batches.
    """

    def __init__(self, work, made: LlamaForCausalLM, data: TensorDict, added: bool):
        self.work, self.made, self.data, self.added = work, made, data, added
        self.peaks: list[float] = []

    def __call__(self) -> None:
        """In MiB."""
        trained = [p for p in self.made.parameters() if p.requires_grad]
        if not self.added:
            self.made.zero_grad(set_to_none=True)
        made_here = sum(p.numel() * p.element_size() for p in trained if p.grad is None)
        restart_peak()
        before = resident_bytes()
        self.work(self.made, self.data)
        self.peaks.append((resident_bytes(peak=True) - before - made_here) / 2**20)


def run() -> list[Row]:
    """Time and peak memory above weights and their gradients, chunked over whole."""
    of = partial(Measured, made=model(), data=batch())
    ways = {"chunked": of(chunked, added=False), "whole": of(whole, added=False), "added": of(chunked, added=True)}
    seconds = alternate(ways, REPETITIONS)
    peaks = {name: way.peaks[1:] for name, way in ways.items()}  # without the first round
    return [
        row("logprob_memory_ratio", ratios(peaks["chunked"], peaks["whole"]), "chunked / whole"),
        row("logprob_time_ratio", ratios(seconds["chunked"], seconds["whole"]), "chunked / whole"),
        row("logprob_chunked", seconds["chunked"], "s"),
        row("logprob_memory_chunked", peaks["chunked"], "MiB, peak"),
        row("logprob_memory_added", peaks["added"], "MiB, peak, gradients added to those of another micro-batch"),
        row("logprob_memory_whole", peaks["whole"], "MiB, peak"),
    ]
