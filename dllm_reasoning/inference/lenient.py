"""Draws in which more drafts are kept than exact sampling keeps, with the log-probs of the changed distribution."""

from collections.abc import Sequence

import torch

from dllm_reasoning.inference.adaptive import AdaptiveWindows
from dllm_reasoning.inference.commit_rules import Row
from verl.algos.acceptance import LenientAcceptance
from verl.rollout.hf_rollout import invert


class LenientDraws:
    """Tokens of each forward for `decode`, with their log-probs under the distribution that they were drawn from.

    A guess was drawn in an earlier forward from q, its distribution there; the forward that verifies it gives p.
    `LenientAcceptance` keeps or replaces it. Every forward draws new numbers from a row's own generator: a draw that
    decided about a draft must not decide about it again. So samples depend on the windows that were used.
    """

    def __init__(self, rule: AdaptiveWindows, lenience: float, temperature: float, seeds: Sequence[int]) -> None:
        self.rule, self.lenience, self.temperature = rule, lenience, temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        # row -> distributions of its last forward's tokens [w, V], and its number of tokens then
        self.drawn_from: dict[int, tuple[torch.Tensor, int]] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[list[int]], list[list[float]]]:
        """logits [B, w, V], float, index 0 after each row's last committed token -> tokens and log-probs [B][w]."""
        target = (logits.float() / self.temperature).softmax(-1)
        width, device = logits.shape[1], logits.device
        uniform = torch.stack([torch.rand(3, width, generator=self.generators[row.number]) for row in rows]).to(device)
        tokens = invert(target.double().cumsum(-1).flatten(0, 1), uniform[:, 0].flatten()).view(-1, width)
        guesses, draft = tokens.clone(), target.clone()
        verified = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
        for i, row in enumerate(rows):
            if row.number in self.drawn_from:
                before, length = self.drawn_from[row.number]
                before = before[len(row.tokens) - length :]
                count = min(len(row.guesses), self.rule.window.guesses, len(before))
                guesses[i, :count] = torch.tensor(row.guesses[:count], device=device)
                draft[i, :count], verified[i, :count] = before[:count], True
        if verified.any():
            rule = LenientAcceptance.of(target[verified], draft[verified], self.lenience)
            guess = guesses[verified]
            kept = uniform[:, 1][verified] < rule.accept.gather(-1, guess[:, None])[:, 0]
            replaced = invert(rule.residual.double().cumsum(-1), uniform[:, 2][verified])
            tokens[verified] = torch.where(kept, guess, replaced)
            target = target.masked_scatter(verified[..., None], rule.behaviour)
        log_probs = target.gather(-1, tokens[..., None])[..., 0].log()
        self.drawn_from = {row.number: (target[i], len(row.tokens)) for i, row in enumerate(rows)}
        return tokens.tolist(), log_probs.tolist()
