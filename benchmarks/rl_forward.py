"""An actor's update with prompts forwarded once for their samples, and with padding left out."""

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, alternate, ratios, row
from verl.training.policy.causal_lm import CausalLMPolicy

GROUPS, N, PROMPT, RESPONSE, VOCABULARY = 4, 8, 256, 64, 1024
REPETITIONS = 5


def model() -> LlamaForCausalLM:
    """4 layers of width 256."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024,
    ))  # fmt: skip


def batch(prompt_lengths: torch.Tensor, response_lengths: torch.Tensor) -> TensorDict:
    """Rows of these lengths, prompts left-padded, n neighbours with one prompt; lengths [groups], [groups * n]."""
    generator = torch.Generator().manual_seed(1)
    rows = len(response_lengths)
    asked = torch.randint(5, VOCABULARY, (len(prompt_lengths), PROMPT), generator=generator)
    ids = torch.cat([asked.repeat_interleave(rows // len(prompt_lengths), 0),
                     torch.randint(5, VOCABULARY, (rows, RESPONSE), generator=generator)], 1)
    lengths = prompt_lengths.repeat_interleave(rows // len(prompt_lengths))[:, None]
    columns = torch.arange(PROMPT + RESPONSE)
    mask = ((columns >= PROMPT - lengths) & (columns < PROMPT + response_lengths[:, None])).long()
    return TensorDict(
        {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
         "responses": (ids * mask)[:, PROMPT:],
         "group_index": torch.arange(len(prompt_lengths)).repeat_interleave(rows // len(prompt_lengths))},
        batch_size=rows,
    )  # fmt: skip


class Update:
    """Forward and backward of a batch one way; keeps the gradients of the last run."""

    def __init__(self, made: LlamaForCausalLM, data: TensorDict, **forward: bool):
        self.model, self.data, self.policy = made, data, CausalLMPolicy()
        self.policy.set_forward(**{"remove_padding": False, "share_prompt": False, **forward})
        self.gradients: list[torch.Tensor] = []

    def __call__(self) -> None:
        self.model.zero_grad()
        log_probs, _ = self.policy.log_probs(self.model, self.data, temperature=1.0, with_entropy=False)
        weights = torch.linspace(-1, 1, len(log_probs))[:, None]
        (log_probs * weights).mean().backward()
        self.gradients = [p.grad.clone() for p in self.model.parameters()]


def difference(a: Update, b: Update) -> float:
    """Largest difference of two updates' gradients, relative to the largest entry of the tensor."""
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-12))
               for x, y in zip(a.gradients, b.gradients, strict=True))


def run() -> list[Row]:
    """Speed of sharing (prompt 4 times the answer, n = 8) and of leaving padding out (lengths drawn evenly)."""
    made = model()
    full = batch(torch.full((GROUPS,), PROMPT), torch.full((GROUPS * N,), RESPONSE))
    plain, shared = Update(made, full), Update(made, full, share_prompt=True)
    seconds = alternate({"plain": plain, "shared": shared}, REPETITIONS)
    generator = torch.Generator().manual_seed(2)
    ragged = batch(torch.randint(16, PROMPT + 1, (GROUPS * N,), generator=generator),
                   torch.randint(1, RESPONSE + 1, (GROUPS * N,), generator=generator))
    padded, packed = Update(made, ragged), Update(made, ragged, remove_padding=True)
    lengths = alternate({"padded": padded, "packed": packed}, REPETITIONS)
    return [
        row("actor_update_shared_speedup", ratios(seconds["plain"], seconds["shared"]), "times, plain / shared"),
        row("actor_update_shared_gradient_difference", [difference(shared, plain)], "relative"),
        row("actor_update_shared", seconds["shared"], "s"),
        row("rmpad_speedup", ratios(lengths["padded"], lengths["packed"]), "times, padded / packed"),
        row("rmpad_gradient_difference", [difference(packed, padded)], "relative"),
        row("rmpad_padding", [1 - float(ragged["attention_mask"].float().mean())], "share of the padded batch"),
    ]
