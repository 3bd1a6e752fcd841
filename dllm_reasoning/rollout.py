"""Rollout `refine`: a model that was trained by iterative refinement drafts its own next tokens and verifies them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dllm_reasoning.inference.commit_rules import AdaptiveWindows, ForwardCosts, Row, windows_of
from dllm_reasoning.inference.generator import SeededDraws, decode
from dllm_reasoning.inference.model_runner import ModelRunner
from dllm_reasoning.inference.settings import NOISE_KEY, RefineRolloutSettings, trained_window
from verl.algos.acceptance import LenientAcceptance
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.base import register_rollout
from verl.rollout.hf_rollout import HFRollout, invert
from verl.rollout.sampling import GenerationRequest, Sampling, build_rollout_batch, right_padded
from verl.utils.problems import Problem, register_check, wrong

LOGITS_AT_ONCE = 2**28  # numbers; a forward of more is never chosen for the sake of drafts


@register_check
def check_settings_of_refine(config: Any, findings: Any) -> Iterator[Problem]:
    """Unknown or wrong settings in rollout.custom."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "refine":
        try:
            RefineRolloutSettings.from_custom(rollout.custom)
        except ValueError as error:
            yield wrong(RefineRolloutSettings.section, str(error))


@register_rollout("refine", "sync")
class RefineRollout(HFRollout):
    """Generates with the actor's own module, several tokens per forward.

    Tokens and log-probs are those of rollout `hf` with the same seeds up to rounding: a token is kept only if the
    forward that predicted it had read the final tokens before it. `rollout.custom` holds RefineRolloutSettings; with
    `lenience` samples are not those of the policy, but their log-probs are known. Raises ValueError for a model without
    a window if none is set.
    """

    rule: AdaptiveWindows | None = None
    rule_version = -1

    def __init__(self, config: RolloutConfig, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.settings = RefineRolloutSettings.from_custom(config.custom)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.tokens = self.row_forwards = self.forwards = 0
        samples = super().generate_sequences(prompts)
        per_forward = self.tokens / max(1, self.row_forwards)
        metrics = {"rollout/tokens_per_forward": [per_forward], "rollout/forwards": [self.forwards]}
        samples.meta_info["metrics"] = metrics
        return samples

    def _generate(self, prompts: DataProto) -> dict[str, torch.Tensor]:
        request = GenerationRequest.from_batch(prompts, self.config)
        n, limit, pad = request.n, self.config.response_length, request.pad_id
        seeds = [seed for of_prompt in request.seeds for seed in of_prompt]
        repeated = [ids for ids in request.prompt_ids for _ in range(n)]
        rows = [Row(number, list(ids), len(ids), limit) for number, ids in enumerate(repeated)]
        longest = max(map(len, request.prompt_ids))
        choose_tokens = SeededDraws(request.sampling, seeds, limit)
        costs = None if self.rule is None else self.rule.costs
        if self.rule is None or (costs is not None and len(rows) > costs.rows[-1]):  # validation may come first
            self.rule = self._make_rule(request, len(rows), longest, choose_tokens)
        if self.rule_version != self.weights_version:
            self.rule.forget()
            self.rule_version = self.weights_version
        if self.settings.lenience is not None and not request.sampling.greedy:
            self._check_lenient(request.sampling, validate=bool(prompts.meta_info.get("validate")))
            choose_tokens = LenientDraws(self.rule, self.settings.lenience, request.sampling.temperature, seeds)
        slots = longest + limit + 2 * self.rule.width - 1
        runner = ModelRunner(self.engine.module, len(request.prompt_ids), slots, pad, use_cache=True)
        runner.prefill(rows, n)
        ends = frozenset(() if self.config.ignore_eos else request.eos_ids)
        self.forwards += 1 + decode(runner, rows, self.rule, ends, choose_tokens)
        self.row_forwards += sum(row.forwards for row in rows)
        answers = [row.tokens[row.prompt_length :] for row in rows]
        self.tokens += sum(map(len, answers))
        responses = right_padded(answers, limit, pad, torch.int64)
        mask = right_padded([[1] * len(answer) for answer in answers], limit, 0, torch.int64)
        log_probs = right_padded([row.log_probs for row in rows], limit, 0.0, torch.float32)
        return build_rollout_batch(prompts, n, responses, mask, log_probs if self.config.calculate_log_probs else None)

    def _check_lenient(self, sampling: Sampling, validate: bool) -> None:
        """Raise ValueError for filters of tokens, which lenient acceptance does not know."""
        if sampling.top_k > 0 or sampling.top_p < 1:
            key = "actor_rollout_ref.rollout" + (".val_kwargs" if validate else "")
            raise ValueError(
                f"actor_rollout_ref.rollout.custom.lenience={self.settings.lenience} needs {key}.top_k=-1 and "
                f"{key}.top_p=1, not {sampling.top_k} and {sampling.top_p}: set those, or leave lenience out."
            )

    def _make_rule(self, request: GenerationRequest, rows: int, longest: int, choose_tokens: Any) -> AdaptiveWindows:
        """The windows of `rollout.custom.mode`, with measured costs if there is a choice."""
        module, settings = self.engine.module, self.settings
        window = settings.window or trained_window(module.config)
        if window is None:
            raise ValueError(
                "actor_rollout_ref.rollout.name=refine needs a model trained by iterative refinement: its config.json "
                "has no dllm_window. Train it with dllm_reasoning.train_iterative_refine "
                "(iterative.noise_pattern=packed), or set actor_rollout_ref.rollout.custom.window to the number of "
                "tokens that it predicts per forward."
            )
        noise = settings.noise_token_id
        if noise is None:
            noise = module.config.to_dict().get(NOISE_KEY)
        if noise is None:
            noise = request.eos_ids[0] if request.eos_ids else request.pad_id
        windows = windows_of(settings.mode, window)
        if len(windows) == 1:
            return AdaptiveWindows(windows, noise)
        widths = [each.width for each in windows]
        runner = ModelRunner(module, rows, longest + max(widths), request.pad_id, use_cache=True)
        most = LOGITS_AT_ONCE // module.config.get_text_config().vocab_size
        costs = ForwardCosts.measure(
            lambda batch: choose_tokens(runner.logits(batch), batch), widths, rows, longest, most
        )
        return AdaptiveWindows(windows, noise, costs)


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
                distributions, length = self.drawn_from[row.number]
                distributions = distributions[len(row.tokens) - length :]  # those of tokens that are now guesses
                count = min(len(row.guesses), self.rule.window.guesses, len(distributions))
                guesses[i, :count] = torch.tensor(row.guesses[:count], device=device)
                draft[i, :count] = distributions[:count]
                verified[i, :count] = True
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
