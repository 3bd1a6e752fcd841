"""Results of losses, estimators, rules and reward helpers that verl has under the same name.

`PYTHONPATH=FOLDER python scripts/audit/values.py` prints {case: result} as JSON for the verl in that folder, such as an
unpacked wheel. releases/values-VERSION.json is what a release prints; `make audit` compares this tree with it.
"""

import contextlib
import importlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from omegaconf import OmegaConf

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro")
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus",
              "reinforce_plus_plus_baseline", "gpg")  # fmt: skip
PENALTIES = ("kl", "abs", "mse", "low_var_kl")
ANSWERS = {
    "gsm8k.compute_score": ("#### 7", "so 7", "#### 1,007", "#### 7 or #### 8"),
    "math_reward.compute_score": ("\\boxed{7}", "7", "\\boxed{7.0}", "\\boxed{7}, \\boxed{8}", "\\fbox{7}"),
    "math_verify.compute_score": ("\\boxed{7}", "7", "The answer is 7.", "\\boxed{8}", "\\boxed{14/2}"),
    "math_dapo.compute_score": ("Answer: 7", "\\boxed{7}", "Answer: 7 but \\boxed{8}", "7", "Answer: \\boxed{7}"),
    "geo3k.compute_score": ("<think>x</think>\\boxed{7}", "\\boxed{7}", "7"),
    **dict.fromkeys(
        ("search_r1_like_qa_em.compute_score", "search_r1_like_qa_em.compute_score_subem"),
        ("<answer>The 7!</answer>", "<answer>7 or 8</answer>", "7", "<answer>7", "<answer>7</answer>" * 11),
    ),
    **dict.fromkeys(
        ("gsm8k.extract_solution", "math_reward.is_equiv", "search_r1_like_qa_em.em_check",
         "search_r1_like_qa_em.normalize_answer", "search_r1_like_qa_em.extract_solution"),
        ("#### 7", "7", "The 7!", "<answer>7</answer>", "7 \\%"),
    ),
    "numina_olympiads": ("\\boxed{7}", "7", "The answer is 7.", "Answer: 7", "7 or 8"),
}
REPLIES = {
    "success": {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "3"}},
    "wrong": {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4"}},
    "raised": {"status": "Failed", "run_result": {"status": "Finished", "return_code": 1, "stderr": "x"}},
    "slow": {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}},
    "not compiled": {"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}},
    "compiled slowly": {"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}},
    "unanswered": None,
}
REPORT = ("case_index", "status", "api_status", "run_status", "compile_status", "exit_code", "stdout", "stderr",
          "expected_output", "api_request_error")  # fmt: skip


# case (a pattern) -> the releases whose result is another one, and why
REASONS: dict[str, tuple[tuple[str, ...], str]] = {
    "loss gspo *": (("0.9.1",), "GSPO's mean is one over sequences, as up to 0.9.0"),
    "*seq-mean-token-sum-norm": (("0.7.0",), "the mean over sequences, as in 0.9.1"),
    "math_reward.compute_score *": (("0.7.0", "0.9.1"), "equal numbers and \\fbox count"),
    "math_verify.compute_score *": (("0.7.0", "0.9.1"), "MATH asks for a box"),
    "math_dapo.compute_score *": (("0.7.0",), "a box without Answer: counts, as in 0.9.1"),
    "check_correctness compiled slowly": (("0.7.0", "0.9.1"), "the result is -3, as for every limit of time"),
}


def batch() -> dict[str, torch.Tensor]:
    """Four samples of two prompts, of at most three tokens."""
    old = torch.tensor([[-1.0, -0.5, -2.0], [-0.7, -1.2, -0.3], [-1.5, -0.2, -0.9], [-0.4, -0.8, -1.1]])
    steps = torch.tensor([[0.3, -0.1, 0.2], [-0.4, 0.5, 0.1], [0.05, -0.6, 0.4], [0.9, 0.2, -0.3]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    advantages = torch.tensor([[1.0], [-0.5], [0.25], [-1.0]]).expand(4, 3) * mask
    rewards = torch.tensor([[0.0, 0, 1], [0, 0.5, 0], [0.25, 0, 0], [0, 0, 1]])
    return {"old": old, "new": old + steps, "mask": mask, "advantages": advantages, "rewards": rewards}


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, function without arguments) of each case."""
    core, given = importlib.import_module("verl.trainer.ppo.core_algos"), batch()
    old, new, mask = given["old"], given["new"], given["mask"]
    for name in LOSSES:
        for mode in AGGREGATIONS:
            yield f"loss {name} {mode}", lambda name=name, mode=mode: core.get_policy_loss_fn(name)(
                old, new, given["advantages"], mask, mode, _actor(name)
            )[0]
    for mode in AGGREGATIONS:
        yield f"agg_loss {mode}", lambda mode=mode: core.agg_loss(new - old, mask, mode)
    for name in PENALTIES:
        yield f"kl_penalty {name}", lambda name=name: core.kl_penalty(new, old, name)
    for name in ESTIMATORS:
        yield f"advantage {name}", lambda name=name: core.get_adv_estimator_fn(name)(
            token_level_rewards=given["rewards"].clone(), response_mask=mask, config=_algorithm(),
            index=np.array(["a", "a", "b", "b"], dtype=object),
        )[0] * mask  # fmt: skip
    yield "advantage gae", lambda: core.compute_gae_advantage_return(given["rewards"], new, mask, 0.9, 0.8)[0] * mask
    yield "advantage remax", lambda: core.compute_remax_outcome_advantage(
        given["rewards"], torch.tensor([0.5, 0.0, 1.0, -0.5]), mask
    )[0] * mask  # fmt: skip
    for name in ("optimal_token_baseline", "multi_turn_optimal_token_baseline"):
        yield f"advantage {name}", lambda name=name: getattr(core, f"compute_{name}_advantage")(
            token_level_rewards=given["rewards"], response_mask=mask, old_log_probs=old, sum_pi_squared=old.exp(),
            index=np.array(["a", "a", "b", "b"], dtype=object),
        )[0] * mask  # fmt: skip
    yield "advantage gdpo", lambda: core.compute_gdpo_outcome_advantage(
        given["rewards"], mask, np.array(["a", "a", "b", "b"], dtype=object), config=_algorithm(
            gdpo_reward_keys=["right", "short"], gdpo_reward_weights=[1.0, 0.5]
        ), non_tensor_batch={"right": np.array([1.0, 0, 0, 1]), "short": np.array([0.2, 0.4, 0.1, 0.6])},
        batch={"prompts": torch.ones(4, 1), "attention_mask": torch.cat([torch.ones(4, 1), mask], 1).long()},
    )[0] * mask  # fmt: skip
    yield "compute_policy_loss", lambda: core.compute_policy_loss(
        old, new, given["advantages"], mask, 0.2, 0.1, 0.3, 3.0
    )
    yield "compute_policy_loss_reinforce", lambda: core.compute_policy_loss_reinforce(
        old, new, given["advantages"], mask, "token-mean", _actor("vanilla"), mask * 0.5
    )[0]
    yield "returns gae", lambda: core.compute_gae_advantage_return(given["rewards"], new, mask, 0.9, 0.8)[1] * mask
    for kind in ("fixed", "adaptive"):
        yield f"kl controller {kind}", lambda kind=kind: _controlled(core, kind)
    yield "compute_value_loss", lambda: core.compute_value_loss(new, given["rewards"], old, mask, 0.25)
    yield "compute_entropy_loss", lambda: core.compute_entropy_loss(torch.arange(24.0).sin().view(4, 3, 2), mask)
    yield "compute_rewards", lambda: core.compute_rewards(given["rewards"], new, old, 0.1)
    rewards = importlib.import_module("verl.utils.reward_score")
    for rule, texts in ANSWERS.items():
        for text in texts:
            yield f"{rule} {text}", lambda rule=rule, text=text: _scored(rewards, rule, text)
    sandbox = importlib.import_module("verl.utils.reward_score.sandbox_fusion.utils")
    for name, reply in REPLIES.items():
        yield f"check_correctness {name}", lambda reply=reply: _checked(sandbox, reply)


def _actor(name: str) -> Any:
    config = importlib.import_module("verl.workers.config")
    policy = importlib.import_module("verl.workers.config.actor").PolicyLossConfig(
        loss_mode=name, **({"dro_beta": 0.1} if name == "dro" else {})
    )
    sizes = {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    return config.FSDPActorConfig(strategy="fsdp2", policy_loss=policy, **sizes)


def _algorithm(**more: Any) -> Any:
    return importlib.import_module("verl.trainer.config").AlgoConfig(gamma=0.9, lam=0.8, **more)


def _controlled(core: Any, kind: str) -> float:
    """The coefficient after an update with a KL divergence above the target."""
    settings = {"type": kind, "kl_coef": 0.2, "target_kl": 0.1, "horizon": 100}
    controller = core.get_kl_controller(OmegaConf.create(settings))
    controller.update(current_kl=0.5, n_steps=10)
    return controller.value


def _scored(rewards: Any, rule: str, text: str) -> Any:
    module, _, function = rule.partition(".")
    if not function:
        return rewards.default_compute_score(rule, text, "7")
    called = getattr(importlib.import_module(f"{rewards.__name__}.{module}"), function)
    if function in ("extract_solution", "normalize_answer"):
        return called(text)
    return called(text, {"target": ["7"]} if module.startswith("search") and "score" in function else "7")


def _checked(sandbox: Any, reply: dict[str, Any] | None) -> Any:
    with mock.patch.object(sandbox, "call_sandbox_api", lambda *_, **__: (reply, None if reply else "no answer")):
        results, reports = sandbox.check_correctness("http://x", {"inputs": ["1 2"], "outputs": ["3"]}, "print(3)", 5)
    return results, {name: reports[0].get(name, "missing") for name in REPORT}


def plain(value: Any) -> Any:
    """A result as JSON has it; numbers with five significant digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def results() -> dict[str, Any]:
    """{case: result, or the name of the exception that it raises}."""
    found: dict[str, Any] = {}
    for name, run in cases():
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # verl's Search-R1 rules print some answers
                found[name] = plain(run())
        except Exception as error:
            found[name] = f"raises {type(error).__name__}"
    return found


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, numbers to the last digit that is kept."""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-4)
    return ours == theirs


def unexplained(version: str) -> list[str]:
    """A line for each case whose result is not that of the release and has no reason, and for each unneeded reason."""
    file, lines = Path(__file__).parent / "releases" / f"values-{version}.json", []
    if not file.is_file():
        return lines
    theirs, ours, needed = json.loads(file.read_text(encoding="utf-8")), results(), set()
    for name, value in theirs.items():
        if _same(ours.get(name), value) or str(value).startswith("raises "):
            continue
        pattern = next((p for p in REASONS if version in REASONS[p][0] and fnmatchcase(name, p)), None)
        needed.add(pattern)
        if pattern is None:
            lines.append(f"{name}: verl {version} gives {value}, this tree {ours.get(name)}, without a reason")
    unneeded = [p for p, (versions, _) in REASONS.items() if version in versions and p not in needed]
    return [*lines, *(f"scripts/audit/values.py: {p!r} excuses nothing of {version} any more" for p in unneeded)]


def main() -> None:
    logging.disable(logging.CRITICAL)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results().items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
