"""All settings of the recipe: its config group `spd`. Environment variables override its reward."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from omegaconf import MISSING

from verl.config.fields import check_settings, refuse_unknown, setting, value_errors

BACKBONES = ["own", "target"]  # recipe.spd.scorer.auto.register_scorer appends others
# environment variable -> coefficient; a variable that is set wins over the config
VARIABLES = {
    "REWARD_ALPHA": "alpha", "REWARD_PENALTY_BREAK": "penalty_break", "REWARD_USELESS": "useless",
    "REWARD_CORRECT_BASE": "correct_base",
}  # fmt: skip


@dataclass(frozen=True)
class SPDRewardConfig:
    """The coefficients, in points of reward (group spd.reward); VARIABLES override them.

    With a lower `penalty_break` the scorer first learns to reject everything, which takes longer. A threshold on its
    logit, chosen on held-out questions, is a cheaper way to the last points of accuracy.
    """

    section: ClassVar[str] = "spd.reward"
    alpha: float = setting(0.125, "For each accepted draft token of a block that ends in a right answer.")
    penalty_break: float = setting(-16.0, "For a block that turns a right answer wrong: speed against accuracy.")
    useless: float = setting(0.0, "For a block after which the answer is as wrong as before.")
    correct_base: float = setting(1.0, "For a block that repairs a wrong answer, in addition to alpha.")
    length: str = setting(
        "effective", "effective: every leading accept; gain: those beyond exact match.", choices=("effective", "gain")
    )
    zero_length: str = setting(
        "neutral", "A block with nothing accepted: neutral gives reward 0, mask drops it.", choices=("neutral", "mask")
    )
    length_penalty: float = setting(
        0.0, "Penalty of a correct answer: this times max(0, length - baseline's) / baseline's.", low=0
    )

    def __post_init__(self) -> None:
        check_settings(self)


def reward_config(settings: Mapping[str, Any]) -> SPDRewardConfig:
    """Settings by name, overridden by REWARD_* environment variables; ValueError for an unknown name."""
    refuse_unknown("spd.reward", settings, [f.name for f in fields(SPDRewardConfig)])
    values = dict(settings)
    for variable, name in VARIABLES.items():
        if variable in os.environ:
            try:
                values[name] = float(os.environ[variable])
            except ValueError as error:
                raise ValueError(f"{variable}={os.environ[variable]!r} is not a number.") from error
    return SPDRewardConfig(**values)


@dataclass(frozen=True)
class SPDRolloutSettings:
    """Group spd.rollout: the completions of hybrid contexts."""

    section: ClassVar[str] = "spd.rollout"
    servers: list[str] | str | None = setting(
        None, "URLs of vLLM servers of the target (SPD_VLLM_URLS overrides it); null starts one on this machine."
    )
    served_model: str | None = setting(None, "Name under which servers serve the target; null: its path.")
    server_args: list[str] = setting(list, "Further arguments of the local server, as on vLLM's command line.")
    server_log: str = setting("vllm_server.log", "Output of the local server.")
    start_timeout_s: float = setting(300.0, "Seconds until the local server must be ready.", above=0)
    max_model_len: int | None = setting(None, "Maximum tokens of context and completion; null: as needed.", low=1)
    store_path: str = setting("completions.sqlite3", "File of completions; runs with the same target may share it.")
    lost_share_max: float = setting(
        0.05, "The run ends if a larger share of a step's samples gets no completion.", low=0, high=1
    )
    rounds: int = setting(1, "Blocks judged before the target completes the answer; only the first is trained.", low=1)
    draft_path: str | None = setting(
        None, "Draft model of the blocks: needed for rounds above 1, and recorded in the scorer, which a server checks."
    )
    max_tokens: int = setting(
        256, "Maximum tokens of an answer, from the end of the question; one that is cut there counts as wrong.", low=1
    )
    timeout_s: float = setting(120.0, "Seconds of one request.", above=0)
    attempts: int = setting(4, "Attempts of one request, each on the next server.", low=1)
    prompts_per_request: int = setting(48, "Contexts in one request.", low=1)
    concurrency: int = setting(8, "Requests in flight from one rank.", low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.rounds > 1 and not self.draft_path:
            raise ValueError(
                f"spd.rollout.rounds={self.rounds} needs the draft model to decode further: name its directory in "
                "spd.rollout.draft_path, or use spd.rollout.rounds=1."
            )


@dataclass(kw_only=True)
class ScorerSettings:
    """The settings of group spd that a saved scorer keeps too."""

    section: ClassVar[str] = "spd"
    backbone: str = setting(
        "target",
        "target: a small head on the target's hidden states; own: a model that reads the block.",
        choices=BACKBONES,
        hint="A scorer of your own is known where VERL_USE_EXTERNAL_MODULES names its module.",
    )
    attention: str = setting(
        "causal", "Mask of an own backbone; target is causal.", choices=("causal", "spd", "hybrid")
    )
    context_tokens: int = setting(0, "Last context tokens that an own backbone reads; 0 for all.", low=0)
    head_inputs: str = setting(
        "state",
        "Inputs of the head. own: state is the hidden state at the target token, pair adds the state before the draft "
        "token and both tokens' embeddings; target: state is the hidden state that predicted the target token, with "
        "both embeddings, pair adds the state at the draft token, logits also the target's entropy and the margin "
        "of its own token's logit over the draft token's (in training only for targets with tied embeddings).",
        choices=("state", "pair", "logits"),
    )
    head_size: int = setting(
        128, "Width of the head's hidden layers; an own backbone with head_inputs=state always uses H / 4.", low=1
    )
    state_layer: int | None = setting(
        None,
        "Number of a layer of the target: instead of the embeddings, a target head also reads the states after it at "
        "the token before the draft token and at the draft token. Try two thirds of the layers. null: only states "
        "after the last layer.",
        low=1,
    )
    seed: int = setting(42, "Seed of actions and of the head's initial weights.", low=0)


@dataclass
class SPDSettings(ScorerSettings):
    """Group spd: the scorer, its reward and its rollout."""

    section: ClassVar[str] = "spd"
    feature_store: str | None = setting(None, "Folder that caches the target's hidden states; null recomputes them.")
    adapter_path: str | None = setting(None, "Saved scorer, or a checkpoint's lora_adapter, to start from.")
    sample_temperature: float = setting(
        1.0, "T of a ~ Bernoulli(sigmoid(z / T)); SPD_SAMPLE_TEMPERATURE overrides it.", above=0
    )
    loss_positions: str = setting(
        "judged",
        "judged: mismatches up to the first rejection count in the loss; all: every mismatch.",
        choices=("judged", "all"),
    )
    truncated: str = setting(
        "exclude",
        "Blocks whose own answer by the target is cut at spd.rollout.max_tokens: exclude, or keep (as wrong).",
        choices=("exclude", "keep"),
    )
    target_path: str = setting(MISSING, "The target model, which completes contexts (folder or name at the servers).")
    reward: SPDRewardConfig = setting(SPDRewardConfig, "The reward of a judged block.")
    rollout: SPDRolloutSettings = setting(SPDRolloutSettings, "Completions of hybrid contexts.")

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> SPDSettings:
        """Settings from actor_rollout_ref.rollout.custom; ValueError names a missing, unknown or wrong key."""
        custom = dict(custom or {})
        if "target_path" not in custom:
            raise ValueError(
                "actor_rollout_ref.rollout.custom lacks target_path: rollout.name=spd needs the group spd there. Start "
                "with --config-path pkg://recipe.spd.config --config-name spd_trainer, which sets it."
            )
        refuse_unknown("spd", custom, [f.name for f in fields(cls)])
        if errors := value_errors(cls, custom, "spd"):  # reward and rollout check their own values, below
            raise ValueError("\n".join(message for _, message in errors))
        rollout = dict(custom.pop("rollout", {}))
        refuse_unknown("spd.rollout", rollout, [f.name for f in fields(SPDRolloutSettings)])
        if isinstance(rollout.get("server_args"), list | tuple):  # Hydra makes a number of a value such as 2
            rollout["server_args"] = [str(part) for part in rollout["server_args"]]
        reward = reward_config(custom.pop("reward", {}))
        return cls(**custom, reward=reward, rollout=SPDRolloutSettings(**rollout))
