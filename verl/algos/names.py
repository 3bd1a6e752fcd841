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
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


#: estimators whose baseline comes from the other samples of a prompt
COMPARES_SAMPLES = tuple(AdvantageEstimator(name) for name in (
    "grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline", "gdpo",
    "optimal_token_baseline", "tir_optimal_token_baseline",
))  # fmt: skip

#: estimators that read sum_pi_squared
READS_SQUARES = (AdvantageEstimator.OPTIMAL_TOKEN_BASELINE, AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)

#: losses that are means over sequences, whatever actor.loss_agg_mode says
MEANS_OVER_SEQUENCES = ("gspo", "sapo", "geo_mean")

POLICY_LOSSES = (
    "vanilla", "gspo", "sapo", "gpg", "cispo", "clip_cov", "kl_cov", "geo_mean", "bypass_mode", "dppo_tv", "dppo_kl",
    "dro",
)  # fmt: skip
