"""A target, a draft that mostly agrees with it and a head that accepts about half of the rest, all from a seed."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from recipe.spd.rollout.decoder import SpecResult, speculative_generate
from scripts.spd_evaluation.rules import exact, scorer
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig
from tests.helpers.models import save_tiny_llama
from verl.data.fingerprint import cached_folder_fingerprint

LIMIT, GAMMA, EOS = 24, 5, 2


@dataclass
class ServedPair:
    """Folders of the three, and the recipe's own decoder on them."""

    target: str
    draft: str
    scorer: str

    def decode(self, prompts: list[list[int]], threshold: float | None) -> SpecResult:
        """Greedy tokens of each prompt; None: exact acceptance. As vLLM does, the first token comes from the target."""
        target, draft = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (self.target, self.draft))
        judge = exact()
        if threshold is not None:
            judge = scorer(AutoModelForSPDScoring.from_pretrained(self.scorer, self.target, target), threshold)
        return speculative_generate(
            target, draft, prompts, judge, gamma=GAMMA, max_new_tokens=LIMIT, eos_token_id=EOS, target_first=True
        )


def make_pair(folder: Path, tied: bool = False) -> ServedPair:
    """Save the three below `folder`; with `tied` embeddings, as most small models have them, the head reads logits."""
    torch.manual_seed(0)
    paths = {name: str(folder / name) for name in ("target", "draft", "scorer")}
    save_tiny_llama(paths["target"], tied=tied)
    model = AutoModelForCausalLM.from_pretrained(paths["target"])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)  # distinct logits: rounding must not decide
        model.save_pretrained(paths["target"])
        shutil.copytree(paths["target"], paths["draft"])
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
        model.save_pretrained(paths["draft"])
    scorer = AutoModelForSPDScoring.from_config(ScoringModelConfig(
        base_model_path=paths["target"], head_inputs="logits" if tied else "state", state_layer=1 if tied else None
    ))
    with torch.no_grad():
        scorer.head.out.weight.mul_(20.0)
    scorer.config.draft_fingerprint = cached_folder_fingerprint(paths["draft"])
    scorer.save_pretrained(paths["scorer"])
    return ServedPair(**paths)


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 13, (count,), generator=generator).tolist()
    return [torch.randint(5, 60, (n,), generator=generator).tolist() for n in lengths]
