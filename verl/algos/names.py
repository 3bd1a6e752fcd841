"""Names of the algorithms that come with verl, for a driver that checks a config without loading them."""

from enum import StrEnum


class AdvantageEstimator(StrEnum):
    """Names of the estimators that come with verl."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPD = "opd"


#: estimators whose baseline comes from the other samples of a prompt
COMPARES_SAMPLES = tuple(AdvantageEstimator(name) for name in (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline",
))  # fmt: skip


POLICY_LOSSES = ("vanilla", "gspo", "sapo", "gpg", "cispo", "clip_cov", "kl_cov", "geo_mean", "bypass_mode")
