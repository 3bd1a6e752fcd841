"""Policy losses, one function per loss, in one registry; the value loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algos.aggregation import StepCounts, agg_loss, masked_mean
from verl.algos.rollout_correction import compute_rollout_correction_and_rejection_mask, settings_of
from verl.config.actor import ActorConfig
from verl.config.critic import CriticConfig
from verl.utils.registry import Registry


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss reads of a micro-batch besides the settings; tensors are [B, T].

    Attributes:
        log_prob: log-probs of the policy that is trained, with their graph.
        old_log_prob: log-probs that the ratio is taken against.
        advantages: advantage of each token.
        response_mask: 1 = the token counts.
        counts: what losses are divided by. The default counts the tokens of these tensors.
        rollout_is_weights: importance weights that correct for the rollout; None for none.
        columns: the micro-batch by column, [B] or [B, T], with those that the loss was registered to read.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    counts: StepCounts = field(default_factory=StepCounts)
    rollout_is_weights: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def log_ratio(self) -> Tensor:
        """log(pi / pi_old) [B, T], within 20 so that its exponential stays finite."""
        return (self.log_prob - self.old_log_prob).clamp(-20.0, 20.0)

    def aggregate(self, losses: Tensor, loss_agg_mode: str) -> Tensor:
        """One number from the losses of tokens [B, T], weighted by `rollout_is_weights`: see `agg_loss`."""
        if self.rollout_is_weights is not None:
            losses = losses * self.rollout_is_weights
        return agg_loss(losses, self.response_mask, loss_agg_mode, **asdict(self.counts))


LossAndMetrics = tuple[Tensor, dict[str, Any]]
PolicyLoss = Callable[[LossInputs, ActorConfig], LossAndMetrics]

LOSS_FUNCTIONS: Registry[str, PolicyLoss] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "Your own: register it with register_policy_loss in a module named by actor_rollout_ref.model.external_lib.",
)
LOSS_COLUMNS: dict[str, tuple[str, ...]] = {}  # what a loss reads from `LossInputs.columns`, by its name
LOSSES_OF_ADVANTAGES: set[PolicyLoss] = set()  # without a gradient where the advantage is 0 and the ratio 1
get_loss_fn = LOSS_FUNCTIONS.find


def register_policy_loss(
    name: str, reads: Sequence[str] = (), of_advantages: bool = False
) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: enter a loss `fn(inputs: LossInputs, config: ActorConfig) -> (scalar loss, metrics)` under a name.

    The loss finds the columns that `reads` names in `inputs.columns`: tensors of the batch, and columns of numbers of
    the data file, an agent loop or the reward function (docs/plugins.md). `of_advantages`: a token with advantage 0
    and ratio 1 changes neither gradient nor metrics, so that an update may leave it out. A loss with verl's signature
    is registered with `verl.trainer.ppo.core_algos.register_policy_loss`.
    """

    def enter(loss: PolicyLoss) -> PolicyLoss:
        LOSS_FUNCTIONS.register(name)(loss)
        LOSS_COLUMNS[name] = tuple(reads)
        if of_advantages:
            LOSSES_OF_ADVANTAGES.add(loss)
        return loss

    return enter


def _clip_range(config: ActorConfig) -> tuple[float, float]:
    """(low, high) of the ratio's clip range; each falls back to `clip_ratio`."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def _free_and_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-A r and -A clip(r, 1 - low, 1 + high), both [B, T]."""
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def _mean(values: Tensor, mask: Tensor) -> float:
    return masked_mean(values.detach().float(), mask).item()


def _metrics(log_ratio: Tensor, mask: Tensor, clipped: Tensor, below: Tensor | None = None) -> dict[str, float]:
    """Share of tokens clipped, mean log(pi_old / pi), share clipped for A < 0 (None: the loss does not clip there)."""
    return {
        "actor/pg_clipfrac": _mean(clipped, mask),
        "actor/ppo_kl": _mean(-log_ratio, mask),
        "actor/pg_clipfrac_lower": 0.0 if below is None else _mean(below, mask),
    }


def _dual_clip(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token dual-clip loss, whether clipped by the range, whether clipped by c; all [B, T]."""
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must be above 1 (it bounds the ratio for A < 0); usual: 3.0.")
    free, clipped = _free_and_clipped(log_ratio.exp(), advantages, low, high)
    ppo = torch.maximum(free, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(ppo, bound), ppo)
    return losses, clipped > free, (ppo > bound) & negative


@register_policy_loss("vanilla", of_advantages=True)
def vanilla_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """PPO's clipped loss with dual clip. All [B, T] -> scalar, metrics.

    r = pi / pi_old;  L = max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347), and for A < 0
    min(L, -A c) (arXiv 1912.09729), so that one very unlikely token cannot blow up the loss.
    """
    log_ratio = inputs.log_ratio()
    losses, clipped, below = _dual_clip(log_ratio, inputs.advantages, *_clip_range(config), config.clip_ratio_c)
    loss = inputs.aggregate(losses, config.loss_agg_mode)
    return loss, _metrics(log_ratio, inputs.response_mask, clipped, below)


@register_policy_loss("gspo", of_advantages=True)
def gspo_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """Clipping of the sequence's ratio (GSPO-token, arXiv 2507.18071). All [B, T] -> scalar, metrics.

    s_i = (pi / pi_old of the sequence)^(1 / length); s_it = sg(s_i) * pi_t / sg(pi_t);
    L = mean over sequences of the token mean of max(-A s, -A clip(s)). The formula is a sequence mean, whatever
    `loss_agg_mode` says.
    """
    log_ratio = inputs.log_prob - inputs.old_log_prob
    sequence = masked_mean(log_ratio, inputs.response_mask, axis=-1).unsqueeze(-1)  # [B, 1]
    ratio = (inputs.log_prob - inputs.log_prob.detach() + sequence.detach()).clamp(max=10.0).exp()
    free, clipped = _free_and_clipped(ratio, inputs.advantages, *_clip_range(config))
    losses = torch.maximum(free, clipped)
    loss = inputs.aggregate(losses, "seq-mean-token-mean")
    return loss, _metrics(log_ratio, inputs.response_mask, clipped > free)


@register_policy_loss("sapo", of_advantages=True)
def sapo_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """A soft gate in place of the clip (SAPO, arXiv 2511.20347). All [B, T] -> scalar, metrics.

    f(r) = 4 / tau * sigmoid(tau * (r - 1)), tau = tau_pos for A > 0 and tau_neg otherwise; L = -f(r) A, a mean over
    sequences of token means, whatever `loss_agg_mode` says.
    """
    log_ratio = inputs.log_ratio()
    tau = torch.full_like(inputs.advantages, config.tau_neg).masked_fill(inputs.advantages > 0, config.tau_pos)
    gate = 4.0 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    loss = inputs.aggregate(-gate * inputs.advantages, "seq-mean-token-mean")
    return loss, _metrics(log_ratio, inputs.response_mask, torch.zeros_like(gate))


@register_policy_loss("gpg", of_advantages=True)
def gpg_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """Plain policy gradient L = -A log pi, no ratio (GPG, arXiv 2504.02546). All [B, T] -> scalar, metrics."""
    return inputs.aggregate(-inputs.log_prob * inputs.advantages, config.loss_agg_mode), {}


@register_policy_loss("cispo", of_advantages=True)
def cispo_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """The clipped ratio as a constant weight (CISPO, arXiv 2506.13585). All [B, T] -> scalar, metrics.

    L = -sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps a gradient.
    """
    low, high = _clip_range(config)
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp().detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = inputs.aggregate(-clipped * inputs.advantages * inputs.log_prob, config.loss_agg_mode)
    return loss, _metrics(log_ratio, inputs.response_mask, ratio != clipped)


def _clip_cov_scores(inputs: LossInputs, config: ActorConfig, cov: Tensor, keys: Tensor) -> tuple[Tensor, float]:
    """Random `keys` of the tokens whose covariance lies in the band and which PPO does not clip, else -inf."""
    settings = config.policy_loss
    ratio = inputs.log_ratio().exp()
    free, clipped = _free_and_clipped(ratio, inputs.advantages, *_clip_range(config))
    candidates = (cov > settings.clip_cov_lb) & (cov < settings.clip_cov_ub) & (clipped <= free)
    return keys.masked_fill(~candidates, -torch.inf), settings.clip_cov_ratio


def _kl_cov_scores(inputs: LossInputs, config: ActorConfig, cov: Tensor, keys: Tensor) -> tuple[Tensor, float]:
    return cov, config.policy_loss.kl_cov_ratio


# Losses that treat some tokens of a mini-batch differently -> (scores [B, T], share): those with the highest scores
# are chosen, max(1, share * tokens) of them; -inf never is.
TOKEN_SCORES: dict[str, Callable[..., tuple[Tensor, float]]] = {"clip_cov": _clip_cov_scores, "kl_cov": _kl_cov_scores}


def choose_tokens(
    name: str, inputs: LossInputs, config: ActorConfig, keys: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda x: x,
    gather: Callable[[Tensor], tuple[Tensor, int]] = lambda x: (x, 0),
) -> Tensor:
    """The tokens [B, T], True = chosen, that the loss of this name treats differently, of a batch shared by ranks.

    The covariance of a token is (A - mean A) * (log pi - mean log pi), means over counted tokens (arXiv 2505.22617).
    `keys` [B, T] decide where the loss draws tokens; None draws them here. `total` sums a tensor over ranks, `gather`
    concatenates theirs [K] and gives the place of this rank's own; by default the batch is all there is.
    """
    counted = inputs.response_mask != 0  # [B, T]
    inputs = replace(inputs, log_prob=inputs.log_prob.detach(), old_log_prob=inputs.old_log_prob.detach())
    advantages, log_prob = inputs.advantages, inputs.log_prob
    sums = torch.stack([counted.double().sum(), *((x.double() * counted).sum() for x in (advantages, log_prob))])
    tokens, *sums = total(sums)
    mean_advantage, mean_log_prob = (float(x / tokens.clamp(min=1)) for x in sums)
    cov = (advantages - mean_advantage) * (log_prob - mean_log_prob)
    keys = torch.rand_like(cov) if keys is None else keys
    scores, share = TOKEN_SCORES[name](inputs, config, cov, keys)
    scores = scores.masked_fill(~counted, -torch.inf).flatten()
    number = max(int(share * tokens), 1)
    # The highest of all ranks are among the `number` highest of each; a rank with fewer tokens has -inf for the rest.
    best = F.pad(scores, (0, max(0, number - len(scores))), value=-torch.inf).topk(number)
    values, start = gather(best.values)
    places = values.topk(number).indices - start  # within this rank's best, or outside of 0 to `number`
    places = places[(places >= 0) & (places < number)]
    chosen = best.indices[places][best.values[places] > -torch.inf]
    return torch.zeros_like(counted).flatten().index_fill(0, chosen, True).view_as(counted)


def _chosen(name: str, inputs: LossInputs, config: ActorConfig) -> Tensor:
    """What the actor chose over its mini-batch (`chosen`), or else a choice within this batch, as 0 and 1 [B, T]."""
    chosen = inputs.columns.get("chosen", None)
    return (choose_tokens(name, inputs, config) if chosen is None else chosen).to(inputs.log_prob.dtype)


@register_policy_loss("clip_cov")
def clip_cov_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """PPO's loss, without a few random tokens of high covariance (Clip-Cov, arXiv 2505.22617). [B, T] -> [], metrics.

    Tokens with clip_cov_lb < cov(A, log pi) < clip_cov_ub drive the entropy down; max(1, clip_cov_ratio * tokens) of
    them, those that PPO clips already excepted, lose their gradient (`choose_tokens`).
    """
    log_ratio = inputs.log_ratio()
    free, clipped = _free_and_clipped(log_ratio.exp(), inputs.advantages, *_clip_range(config))
    chosen = _chosen("clip_cov", inputs, config)
    mask = inputs.response_mask
    metrics = {"actor/pg_clipfrac": _mean(chosen, mask), "actor/ppo_kl": _mean(-log_ratio, mask)}
    losses = torch.maximum(free, clipped) * (1 - chosen)
    return inputs.aggregate(losses, config.loss_agg_mode), metrics


@register_policy_loss("kl_cov")
def kl_cov_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """Unclipped ratio loss; the tokens of highest covariance also pay |log r| (KL-Cov, arXiv 2505.22617).

    L = -A r, plus ppo_kl_coef * |log pi - log pi_old| on the max(1, kl_cov_ratio * tokens) counted tokens whose
    cov(A, log pi) is highest (`choose_tokens`). All [B, T] -> scalar, metrics.
    """
    log_ratio = inputs.log_ratio()
    pays = _chosen("kl_cov", inputs, config)
    losses = -inputs.advantages * log_ratio.exp() + config.policy_loss.ppo_kl_coef * pays * log_ratio.abs()
    loss = inputs.aggregate(losses, config.loss_agg_mode)
    return loss, {"actor/ppo_kl": _mean(log_ratio.abs(), inputs.response_mask)}


@register_policy_loss("geo_mean")
def geo_mean_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """The geometric mean of the clipped token ratios (GMPO, arXiv 2507.20673). All [B, T] -> scalar, metrics.

    log r_t is clipped to [-low, high], the pessimistic of clipped and free is taken by the sign of A_t;
    L = mean over sequences of -mean(A) * exp(mean_t log r_t), whatever `loss_agg_mode` says.
    """
    low, high = _clip_range(config)
    advantages, mask = inputs.advantages, inputs.response_mask
    log_ratio = inputs.log_prob - inputs.old_log_prob
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = masked_mean(pessimistic, mask, axis=-1).exp()  # [B]
    losses = (-masked_mean(advantages, mask, axis=-1) * ratio).unsqueeze(-1).expand_as(log_ratio)
    clipped = pessimistic != log_ratio
    loss = inputs.aggregate(losses, "seq-mean-token-mean")
    return loss, _metrics(log_ratio, mask, clipped & (advantages > 0), clipped & (advantages < 0))


def _dppo(inputs: LossInputs, config: ActorConfig, divergence: Tensor) -> LossAndMetrics:
    low, high = _clip_range(config)
    up = inputs.log_prob.detach() > inputs.old_log_prob
    # A token leaves the loss where it moves on away from a distant old policy.
    within = torch.where(inputs.advantages > 0, ~(up & (divergence > high)), up | (divergence <= low))
    log_ratio = inputs.log_ratio()
    weight = log_ratio.exp().clamp(max=config.clip_ratio_c).detach() * within
    loss = inputs.aggregate(-weight * inputs.advantages * inputs.log_prob, config.loss_agg_mode)
    return loss, _metrics(log_ratio, inputs.response_mask, ~within, ~within & (inputs.advantages < 0))


@register_policy_loss("dppo_tv", of_advantages=True)
def dppo_tv_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """A trust region by the total variation (DPPO-Binary-TV, arXiv 2602.04879). All [B, T] -> scalar, metrics.

    D = |pi - pi_old| of the sampled token. L = -sg(M min(r, clip_ratio_c)) A log pi, M = 0 where A > 0, r > 1 and
    D > clip_ratio_high, or A <= 0, r < 1 and D > clip_ratio_low, else 1: a token of low probability may move by a large
    ratio, one of high probability may not.
    """
    return _dppo(inputs, config, (inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()).abs())


@register_policy_loss("dppo_kl", of_advantages=True)
def dppo_kl_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """As dppo_tv with the KL divergence of two outcomes, the sampled token or another (DPPO-Binary-KL).

    D = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) with p = pi_old and q = pi of the sampled token.
    """
    old, new = inputs.old_log_prob.double(), inputs.log_prob.detach().double()
    rest_old, rest_new = (torch.log1p(-x.exp().clamp(max=1 - 1e-12)) for x in (old, new))
    divergence = old.exp() * (old - new) + rest_old.exp() * (rest_old - rest_new)
    return _dppo(inputs, config, divergence.to(inputs.log_prob.dtype))


@register_policy_loss("dro")
def dro_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """Policy gradient with a quadratic penalty (DRO, arXiv 2405.19107, 2501.12599). All [B, T] -> scalar, metrics.

    L = -(A log pi - beta / 2 (log pi - log pi_old)^2) with beta = policy_loss.dro_beta.
    """
    beta = config.policy_loss.dro_beta
    log_ratio = inputs.log_prob - inputs.old_log_prob
    losses = -(inputs.advantages * inputs.log_prob - beta / 2 * log_ratio.square())
    loss = inputs.aggregate(losses, config.loss_agg_mode)
    return loss, _metrics(log_ratio, inputs.response_mask, torch.zeros_like(log_ratio))


@register_policy_loss("bypass_mode")
def bypass_mode_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """The loss where old_log_prob [B, T] are the rollout's (algorithm.rollout_correction.bypass_mode).

    ppo_clip: the vanilla loss, whose ratio corrects for the rollout; reinforce: -A w log pi with the truncated weight
    w = pi / pi_rollout. What rejection leaves out counts as a token with loss 0. The weights are those of the present
    policy, known only after its forward: with `rollout_is_batch_normalize` their mean is that of the micro-batch.
    """
    settings = config.policy_loss.rollout_correction
    weights, kept, correction_metrics = compute_rollout_correction_and_rejection_mask(
        inputs.log_prob.detach(), inputs.old_log_prob, inputs.response_mask, **settings_of(settings)
    )
    weight = kept.to(inputs.log_prob.dtype)  # no mask of its own: what is rejected stays in every divisor
    if settings.loss_type == "ppo_clip":
        loss, metrics = vanilla_loss(replace(inputs, rollout_is_weights=weight), config)
        return loss, {**metrics, **correction_metrics}
    if weights is not None:
        weight = weight * weights.batch["rollout_is_weights"]
    loss, _ = reinforce_loss(replace(inputs, rollout_is_weights=weight), config)
    log_ratio = inputs.log_ratio()
    return loss, {**_metrics(log_ratio, kept, torch.zeros_like(log_ratio)), **correction_metrics}


def reinforce_loss(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
    """REINFORCE: -A w log pi, without a ratio to clip (Williams 1992). All [B, T] -> scalar, metrics.

    The weights w (default 1) correct for the policy that sampled, whose log-probs only enter the metrics.
    """
    loss = inputs.aggregate(-inputs.advantages * inputs.log_prob, config.loss_agg_mode)
    log_ratio = inputs.log_ratio()
    return loss, _metrics(log_ratio, inputs.response_mask, torch.zeros_like(log_ratio))


def value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, counts: StepCounts, config: CriticConfig
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss (arXiv 2005.12729). All [B, T] -> (loss, share clipped), scalars.

    L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 with c = `cliprange_value`.
    """
    cliprange = config.cliprange_value
    near = torch.minimum(torch.maximum(vpreds, values - cliprange), values + cliprange)
    free = (vpreds - returns).square()
    clipped = (near - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(free, clipped), response_mask, config.loss_agg_mode, **asdict(counts))
    return loss, masked_mean((clipped > free).float(), response_mask)
