"""Settings of block generation, and what a trained model's config says about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from dllm_reasoning.utils.attention import warn_once
from verl.config.base import BaseConfig
from verl.config.fields import refuse_unknown, setting
from verl.rollout.sampling import Sampling

ADD_EOS_LENGTH = 127  # for models that were trained without a window
WINDOW_KEY, NOISE_KEY = "dllm_window", "dllm_noise_token_id"  # in the model's config.json


@dataclass(frozen=True)
class GenerationSettings:
    """How prompts are continued.

    A block (or window) holds add_eos_length + 1 tokens; None: the model's trained window, else 128. refine_iter:
    rounds after a block's first forward (a round that changes nothing ends them), or `converge`, `slide`, `verify`,
    `branch`, which give the tokens of decoding one by one. noise_token_id None: the trained one, else EOS.
    confidence_threshold: with `slide`, tokens predicted with at least this probability are committed unverified.
    temperature 0 is greedy; top_k -1 and top_p 1 filter nothing. max_length counts the prompt. Without use_cache
    each forward reads the full text.
    """

    add_eos_length: int | None = None
    refine_iter: int | str = 2
    max_new_tokens: int = 1024
    max_length: int = 8192
    noise_token_id: int | None = None
    confidence_threshold: float | None = None
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    use_cache: bool = True

    def __post_init__(self) -> None:
        if self.add_eos_length is not None and self.add_eos_length < 0:
            raise ValueError(f"add_eos_length={self.add_eos_length} is below 0; 0 decodes token by token.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is below 1.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature == 0, self.temperature or 1.0, self.top_k, self.top_p)

    def for_model(self, config: PretrainedConfig, eos_token_id: int) -> GenerationSettings:
        """With the model's window and noise token for those that are None; warns about a block above the window."""
        trained = trained_window(config)
        length = self.add_eos_length
        if length is None:
            length = ADD_EOS_LENGTH if trained is None else trained - 1
        elif trained is not None and length >= trained:
            warn_once(
                f"add_eos_length={length} makes blocks of {length + 1} tokens, but the model was trained on windows of "
                f"{trained}: expect wrong answers with a fixed refine_iter, and no speedup from the lossless modes; "
                f"leave it out to get {trained - 1}"
            )
        noise = self.noise_token_id
        if noise is None:
            noise = config.to_dict().get(NOISE_KEY, eos_token_id)
        return replace(self, add_eos_length=length, noise_token_id=noise)

    def check_prompts(self, prompts: list[list[int]]) -> None:
        """ValueError that names a prompt which is empty or leaves no room for an answer."""
        for number, ids in enumerate(prompts):
            if not 0 < len(ids) < self.max_length:
                raise ValueError(f"prompt {number} has {len(ids)} tokens; it needs at least one, and fewer than "
                                 f"max_length={self.max_length}.")  # fmt: skip


def trained_window(config: PretrainedConfig) -> int | None:
    """W of a model trained by iterative refinement; None for others."""
    return config.to_dict().get(WINDOW_KEY)


@dataclass
class RefineRolloutSettings(BaseConfig, section="actor_rollout_ref.rollout.custom"):
    """rollout.custom of rollout `refine`."""

    mode: str = setting(
        "auto", "plain, slide, verify, or auto: by measured costs.", choices=("plain", "slide", "verify", "auto")
    )
    window: int | None = setting(None, "Tokens that the model predicts per forward; null: its trained window.", low=1)
    noise_token_id: int | None = setting(None, "Token of positions to draft; null: the trained one, else EOS.", low=0)
    lenience: float | None = setting(None, "Lenience of LenientAcceptance; null samples from the policy.", low=1)

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> RefineRolloutSettings:
        """From rollout.custom; ValueError names an unknown or wrong key."""
        custom = custom or {}
        refuse_unknown(cls.section, custom, [field.name for field in fields(cls) if field.name != "_target_"])
        return cls(**custom)


SELF_DRAFT_MODES = ("auto", "slide", "verify", "redraft")


@dataclass
class SelfDraftSettings(BaseConfig, section="self_draft"):
    """How a refined model drafts for itself in vLLM: group `self_draft` of the engine's additional_config."""

    mode: str = setting(
        "auto", "slide, verify, redraft (verify, but a window after a wrong guess has noise alone, at which the next "
        "guesses are drafted), or auto: the widest of slide and verify within tokens_per_step.",
        choices=SELF_DRAFT_MODES,
    )  # fmt: skip
    tokens_per_step: int = setting(
        64, "For mode=auto: tokens per forward, over all running requests, above which a forward gets slower.", low=1
    )
    guesses: int | None = setting(None, "Most guesses of a window; null: those of the trained window.", low=1)

    def max_draft_tokens(self, trained: int) -> int:
        """Most draft tokens of a request in one step: vLLM's `num_speculative_tokens`."""
        return self.most_guesses(trained) * (1 if self.mode == "slide" else 2)

    def most_guesses(self, trained: int) -> int:
        """Guesses of the widest window, for a model trained on windows of `trained` guesses."""
        return trained if self.guesses is None else min(self.guesses, trained)

    def window(self, trained: int, running: int) -> tuple[int, int]:
        """(guesses, noise tokens after them) of each of `running` requests; `trained`: guesses of the full window."""
        guesses = self.most_guesses(trained)
        if self.mode != "auto":
            return guesses, 0 if self.mode == "slide" else guesses
        share = self.tokens_per_step // running - 1  # the last committed token is fed too
        if share >= 2 * guesses:
            return guesses, guesses
        return max(0, min(guesses, share)), 0


def self_draft_options(
    model: str, *, mode: str = "auto", tokens_per_step: int = 64, guesses: int | None = None, **engine: Any
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which a refined model drafts for itself, by SelfDraftSettings; `engine`: further
    ones.

    Raises ValueError for wrong settings or a model without a trained window.
    """
    settings = {"mode": mode, "tokens_per_step": tokens_per_step, "guesses": guesses}
    drafting = SelfDraftSettings(**settings)
    window = trained_window(AutoConfig.from_pretrained(model))
    if window is None:
        raise ValueError(
            f"{model} has no {WINDOW_KEY} in its config.json: its guesses for a window would be rejected. Name a model "
            "trained by iterative refinement with iterative.noise_pattern=packed."
        )
    module = "dllm_reasoning.inference.vllm_drafter"
    proposer = {"method": "custom_class", "model": f"{module}.SelfDrafter"}
    return {
        "model": str(model), "worker_cls": f"{module}.SelfDraftWorker",
        "speculative_config": {**proposer, "num_speculative_tokens": drafting.max_draft_tokens(window - 1)},
        "additional_config": {**engine.pop("additional_config", {}), "self_draft": settings}, **engine,
    }  # fmt: skip
