"""Settings of a scorer in a vLLM engine, checked against its target and drafter before the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from loguru import logger

from recipe.spd.scorer.auto import SCORERS
from recipe.spd.scorer.config import ScoringModelConfig
from recipe.spd.scorer.target import TargetHeadScorer
from verl.config.fields import check_settings, refuse_unknown, setting
from verl.data.fingerprint import cached_folder_fingerprint, model_folder

WORKER = "recipe.spd.vllm_plugin.worker.SPDWorker"
TESTED_VLLM = "0.32."
# Engine option -> the values that work with a scorer; why others are refused, and what to do instead.
WORKING_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((None, False), "A head reads the states of its own target only: serve the merged model."),
    "decode_context_parallel_size": ((None, 1), "Hidden states are not gathered there: use tensor parallelism."),
    "prefill_context_parallel_size": ((None, 1), "Hidden states are not gathered there: use tensor parallelism."),
    "data_parallel_size": ((None, 1), "Only one engine's counts would be reported: start a server for each engine."),
    "enable_batch_sharded_sampling": ((None, False), "Ranks would judge different rows: leave it out."),
    "logprobs_mode": (
        (None, "raw_logprobs", "raw_logits"),
        "Processed values would show the logits of judged tokens: use a raw mode.",
    ),
}


@dataclass(frozen=True)
class ServedScorer:
    """Group `spd` of the engine's additional_config."""

    section: ClassVar[str] = "spd"
    scorer: str
    threshold: float = setting(0.0, "Mismatches with z above it are accepted; a request's spd_threshold overrides it.")
    allow_foreign_target: bool = setting(
        False, "Serve a target with other weights than the head was trained on, such as a quantised one."
    )
    allow_foreign_drafter: bool = setting(False, "Serve another drafter than the one that the blocks came from.")

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def from_engine(cls, additional_config: Mapping[str, Any]) -> ServedScorer:
        """From an engine's additional_config; ValueError names a missing, unknown or wrong key."""
        given = additional_config.get("spd")
        if not isinstance(given, Mapping) or "scorer" not in given:
            raise ValueError("additional_config needs {'spd': {'scorer': DIR}}, the folder of a saved scorer.")
        refuse_unknown("spd", given, [f.name for f in fields(cls)])
        return cls(**given)

    def check(
        self, target: str, speculative: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> ScoringModelConfig:
        """The saved scorer's config; ValueError or OSError unless it fits this target, drafter and engine.

        `speculative`: the engine's speculative_config. `options`: its other options, those left out are the defaults.
        """
        if not speculative:
            raise ValueError("a scorer judges drafts: give the engine a speculative_config (a draft model, or n-gram).")
        method = speculative.get("rejection_sample_method") or "standard"
        if method != "standard":
            raise ValueError(f"rejection_sample_method={method!r} does not work with a scorer. Use 'standard'.")
        for name, (values, instead) in WORKING_VALUES.items():
            if options.get(name) not in values:
                raise ValueError(f"{name}={options[name]!r} does not work with a scorer. {instead}")
        saved = ScoringModelConfig.load(Path(self.scorer))
        if not issubclass(SCORERS[saved.backbone], TargetHeadScorer):
            raise ValueError(
                f"{self.scorer} holds a scorer of spd.backbone={saved.backbone}. vLLM serves heads on the target's "
                "hidden states: train one with spd.backbone=target."
            )
        width = _text_config(target).hidden_size
        fingerprint = "" if self.allow_foreign_target else _fingerprint(target)  # "" is not compared
        needed = replace(saved, base_model_path=target, base_fingerprint=fingerprint, hidden_size=width)
        try:
            SCORERS[saved.backbone].check_trained(Path(self.scorer), needed, None)
        except ValueError as error:
            if fingerprint in ("", saved.base_fingerprint):  # the weights are not what is wrong
                raise
            raise ValueError(
                f"{error} For a quantised copy of that target set spd.allow_foreign_target (serve_spd.py: "
                "--allow-foreign-target), and check its answers."
            ) from error
        if not self.allow_foreign_drafter:
            self._check_drafter(saved, speculative)
        return saved

    def _check_drafter(self, saved: ScoringModelConfig, speculative: Mapping[str, Any]) -> None:
        """Raise ValueError if the engine drafts with another model than made the blocks that the scorer learned on."""
        if not saved.draft_fingerprint:
            logger.warning("{} does not say whose drafts it was trained on; nothing to compare.", self.scorer)
            return
        model = speculative.get("model") or ""  # n-gram drafts come from none
        if _fingerprint(model) != saved.draft_fingerprint:
            drafter = model or speculative.get("method")
            raise ValueError(
                f"the scorer in {self.scorer} was trained on blocks of another drafter (fingerprint "
                f"{saved.draft_fingerprint}) than {drafter!r}. Name that one as the draft model, train a scorer on "
                "blocks of this one, or set spd.allow_foreign_drafter (serve_spd.py: --allow-foreign-drafter) and "
                "check the answers."
            )


def _text_config(model: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()


def _fingerprint(model: str) -> str:
    """Fingerprint of a model's weights; "" where no folder or no weights are found."""
    folder = model_folder(model)
    return (cached_folder_fingerprint(folder) if folder else None) or ""


def engine_options(
    target: str, scorer: str, *, draft: str | None = None, threshold: float = 0.0, gamma: int = 8,
    allow_foreign_target: bool = False, allow_foreign_drafter: bool = False, **engine: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `vllm.LLM` (and of AsyncEngineArgs) that serve `target` with a scorer, checked.

    `draft`: folder of a draft model that proposes `gamma` tokens; or give `speculative_config` for another proposer.
    `engine`: further arguments. Raises ValueError or OSError where scorer, target, drafter or arguments do not fit.
    """
    speculative = engine.pop("speculative_config", None)
    if speculative is None and draft is not None:
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": gamma}
        if _text_config(str(draft)).vocab_size != _text_config(str(target)).vocab_size:
            speculative["use_heterogeneous_vocab"] = True  # one tokenizer, embeddings padded to different sizes
    folder = str(Path(scorer).expanduser().resolve())
    served = ServedScorer(folder, threshold, allow_foreign_target, allow_foreign_drafter)
    served.check(str(target), speculative, engine)
    additional = {**engine.pop("additional_config", {}), "spd": asdict(served)}
    return {
        "model": str(target), "worker_cls": WORKER, "speculative_config": speculative, "additional_config": additional,
        **engine,
    }  # fmt: skip
