"""A draft model that follows the policy by training on its samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from verl.protocol import DataProto
from verl.training.policy import get_policy

ROWS = 16  # samples per optimizer step


class Drafter:
    """The draft model in float32, on the CPU except while it is trained on `device`.

    The loss is the cross-entropy of sampled tokens, which is the KL divergence of the draft model from the distribution
    that was sampled from, plus a constant. Ranks train without each other: their drafts may differ, their samples keep
    the policy's distribution.
    """

    def __init__(self, path: str, lr: float, device: torch.device) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.lr, self.device, self.policy = lr, device, get_policy("causal_lm")
        self.samples: list[DataProto] = []

    def keep(self, samples: DataProto) -> None:
        """Samples for the next `refresh`; columns as in `build_rollout_batch`."""
        self.samples.append(samples.select([*self.policy.required_keys, "response_mask"]))

    def refresh(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Train on each kept sample once, in random order, by AdamW with a new state; gives all weights by name."""
        samples, self.samples = DataProto.concat(self.samples).batch, []
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        self.model.to(self.device).train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0)
        with torch.enable_grad():  # a rollout runs without gradients
            for rows in order.split(ROWS):
                batch = samples[rows].to(self.device)
                mask = batch["response_mask"]
                log_probs, _ = self.policy.log_probs(self.model, batch, temperature=1.0, with_entropy=False)
                loss = -(log_probs * mask).sum() / mask.sum().clamp(min=1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        yield from ((name, weight.detach()) for name, weight in self.model.named_parameters())
        self.model.to("cpu")
