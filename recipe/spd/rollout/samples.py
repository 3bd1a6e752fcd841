"""Judged blocks of a batch: what the target has to complete, how the answers are graded, the metrics of all ranks."""

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recipe.spd.reward import SCENARIOS, scenario_of
from recipe.spd.rollout.answers import is_correct
from recipe.spd.rollout.client import CompletionCounts, Request
from recipe.spd.rollout.hybrid import Hybrid, counted_positions, hybrid_of
from recipe.spd.rollout.store import Completion
from verl.data.chat_template import answer_text

Completions = Mapping[Request, Completion]


class LostCompletionsError(RuntimeError):
    """More completions were lost than spd.rollout.lost_share_max allows."""


@dataclass
class JudgedBlock:
    """All samples of one prompt that have the same actions, and their answer once it is graded.

    Lengths are tokens after the context, None where unknown.
    """

    info: dict[str, Any]  # the row's extra_info
    actions: tuple[int, ...]  # 0/1, [R]
    hybrid: Hybrid
    follows_target: bool  # the answer is the target's own
    unfinished: tuple[int, ...] | None  # the ids that the target must complete; None where no completion is needed
    further: tuple[int, ...] = ()  # tokens that spd.rollout.rounds > 1 added after the hybrid context
    completion: Completion = Completion((), hit_limit=False)
    correct: bool | None = None  # S_h; None: a completion is lost
    length: int | None = None  # of the hybrid answer
    baseline: Completion | None = None  # the target's own completion of the context; None: it is lost
    baseline_correct: bool = False  # S_t

    @property
    def scenario(self) -> str:
        """A, B, C, D or zero, as in the reward."""
        return scenario_of(self.hybrid.effective_len, bool(self.correct), self.baseline_correct)

    @property
    def truncated(self) -> bool:
        """Whether the target's own answer was cut at the token limit."""
        return self.baseline is not None and self.baseline.hit_limit

    def request(self, ids: tuple[int, ...], max_tokens: int) -> Request:
        """Completion of `ids` = the context and more: question and answer together have one limit, whoever wrote them.
        """
        answer_start = self.info.get("question_len") or len(self.info["context_ids"])
        return Request(ids, max_tokens - (len(ids) - answer_start))

    def requests(self, max_tokens: int) -> list[Request]:
        """What is to be completed: the context, for the baseline, and the hybrid; nothing that is over the limit."""
        wanted = [self.request(tuple(self.info["context_ids"]), max_tokens)]
        if self.unfinished is not None:
            wanted.append(self.request(self.unfinished, max_tokens))
        return [request for request in wanted if request.max_tokens > 0]

    def masks(self, width: int, loss_positions: str) -> tuple[list[int], list[int]]:
        """1 where a position counts in the loss, and where it is drafted; both [width]."""
        draft, target = self.info["draft_ids"], self.info["target_ids"]
        padding = [0] * (width - len(draft))
        counted = counted_positions(draft, target, self.hybrid.reached, loss_positions)
        return counted + padding, [1] * len(draft) + padding

    def extra_info(self) -> dict[str, Any]:
        """The row's extra_info with the entries that the reward reads."""
        return {
            **self.info, "effective_len": self.hybrid.effective_len,
            "is_correct_hybrid": None if self.correct is None else int(self.correct),
            "is_correct_baseline": int(self.baseline_correct), "hybrid_length": self.length,
            "baseline_length": None if self.baseline is None else len(self.baseline.token_ids),
            "truncated": self.truncated, "hit_limit": self.completion.hit_limit, "asked": self.unfinished is not None,
        }  # fmt: skip

    def segments(self, tokenizer: Any) -> list[dict[str, str]]:
        """{text, kind} of each draft token (match, accepted, rejected, unused), of correction and completion.

        A mismatch shows "draft token≠target token".
        """
        info, hybrid = self.info, self.hybrid
        drafted, chosen = (tokenizer.convert_ids_to_tokens(list(info[name])) for name in ("draft_ids", "target_ids"))
        segments = []
        for i, token in enumerate(drafted):
            if i >= hybrid.reached:
                segments.append({"text": token, "kind": "unused"})
            elif info["draft_ids"][i] == info["target_ids"][i]:
                segments.append({"text": token, "kind": "match"})
            else:
                kind = "accepted" if self.actions[i] else "rejected"
                segments.append({"text": f"{token}≠{chosen[i]}", "kind": kind})
        if correction := list(hybrid.tokens[hybrid.effective_len :]):
            segments.append({"text": tokenizer.convert_ids_to_tokens(correction)[0], "kind": "correction"})
        if added := [*self.further, *self.completion.token_ids]:
            segments.append({"text": answer_text(tokenizer, added), "kind": "completion"})
        return segments


def judged_block(info: dict[str, Any], actions: tuple[int, ...], eos: Collection[int], rounds: int) -> JudgedBlock:
    """A block before its completion. With L = 0 the answer is the target's own; else further rounds may deviate."""
    hybrid = hybrid_of(info["draft_ids"], info["target_ids"], actions, eos)
    own = hybrid.on_target_path and (hybrid.ended or rounds == 1 or hybrid.effective_len == 0)
    unfinished = None if hybrid.ended or own else (*info["context_ids"], *hybrid.tokens)
    return JudgedBlock(info, actions, hybrid, own, unfinished)


def grade_blocks(blocks: Sequence[JudgedBlock], completions: Completions, tokenizer: Any, max_tokens: int) -> None:
    """Set the answers' completion, correctness and lengths, and the baseline's; `correct` stays None where a needed
    completion is missing.

    Both have the same limit: `max_tokens`, the end token included, from the end of the question. An answer cut there is
    wrong. It is searched after the question, whose worked examples contain answers too.
    """

    @functools.cache
    def answers(ids: tuple[int, ...], ground_truth: str) -> bool:
        return is_correct(answer_text(tokenizer, ids), ground_truth)

    def completed(request: Request) -> Completion | None:
        return completions.get(request) if request.max_tokens > 0 else Completion((), hit_limit=True)

    for block in blocks:
        context, truth = tuple(block.info["context_ids"]), str(block.info["ground_truth"])
        given = context[block.info.get("question_len") or 0 :]

        block.baseline = own = completed(block.request(context, max_tokens))
        if own is None:
            continue
        block.baseline_correct = not own.hit_limit and answers((*given, *own.token_ids), truth)
        if block.follows_target:
            block.correct, block.length = block.baseline_correct, len(own.token_ids)
            continue
        added = (*block.hybrid.tokens, *block.further)
        if block.unfinished is None:
            room = block.request((*context, *added), max_tokens).max_tokens
            done = Completion((), hit_limit=room < 1)  # its end token needs a place
        elif (done := completed(block.request(block.unfinished, max_tokens))) is None:
            continue
        added = (*added, *done.token_ids)
        block.completion, block.length = done, len(added)
        block.correct = not done.hit_limit and answers((*given, *added), truth)


@dataclass
class CompletionStatus:
    """How the completions of one batch went on one rank."""

    counts: CompletionCounts = field(default_factory=CompletionCounts)
    store_bytes: int = 0
    urls: list[str] = field(default_factory=list)
    last_error: str = ""  # of a completion that was lost
    failure: str = ""  # why there are no completions at all; raised on every rank


def rank_totals(samples: Sequence[JudgedBlock], status: CompletionStatus) -> dict[str, float]:
    """One rank's sums over its samples, and `longest`, its largest effective length."""
    kept = [sample for sample in samples if sample.correct is not None]
    lengths = [sample.hybrid.effective_len for sample in kept]
    ratios = [s.length / len(s.baseline.token_ids) for s in kept if s.baseline.token_ids]
    changed = [s.baseline_correct != bool(s.info["is_correct_baseline"]) for s in kept]
    scenarios = Counter(sample.scenario for sample in kept)
    return {
        "samples": len(samples), "kept": len(kept), "accepted": sum(lengths), "longest": max(lengths, default=0),
        "ratios": len(ratios), "ratio_sum": sum(ratios), "limit": sum(s.completion.hit_limit for s in kept),
        "truncated": sum(s.truncated for s in kept), "changed": sum(changed),
        **{f"completions/{name}": value for name, value in asdict(status.counts).items()},
        **{f"scenario/{name}": scenarios[name] for name in SCENARIOS},
    }  # fmt: skip


def batch_metrics(ranks: Sequence[tuple[dict[str, float], CompletionStatus]], share_max: float) -> dict[str, float]:
    """spd/* from each rank's totals and status, the same on every rank.

    Raises RuntimeError where a rank failed, LostCompletionsError where more than `share_max` of the samples have no
    completion.
    """
    totals, statuses = zip(*ranks, strict=True)
    total = {name: float(sum(values[name] for values in totals)) for name in totals[0]}
    if failures := [status.failure for status in statuses if status.failure]:
        raise RuntimeError(f"spd rollout: {failures[0]}")
    lost = total["samples"] - total["kept"]
    if lost > share_max * total["samples"]:
        why = next((status.last_error for status in statuses if status.last_error), "no completion came")
        raise LostCompletionsError(
            f"{lost:.0f} of {total['samples']:.0f} samples have no completion from the servers "
            f"{', '.join(statuses[0].urls)} (last error: {why}); spd.rollout.lost_share_max={share_max} "
            "allows fewer. Check the servers, then start the run again: it resumes, and completions made so far are "
            "kept."
        )
    kept = max(1.0, total["kept"])
    metrics = {f"spd/completions/{name}": total[f"completions/{name}"] for name in asdict(CompletionCounts())}
    if total["completions/requested"]:
        metrics["spd/completions/hit_rate"] = total["completions/stored"] / total["completions/requested"]
    metrics |= {
        "spd/store/mib": max(status.store_bytes for status in statuses) / 2**20,
        "spd/dropped_samples": lost, "spd/hit_limit": total["limit"] / kept,
        "spd/baseline/truncated": total["truncated"] / kept, "spd/baseline/changed": total["changed"] / kept,
        "spd/accepted_len/mean": total["accepted"] / kept,
        "spd/accepted_len/max": float(max(values["longest"] for values in totals)),
        **{f"spd/scenario/{name}": total[f"scenario/{name}"] / kept for name in SCENARIOS},
    }  # fmt: skip
    if total["ratios"]:
        metrics["spd/output_length_ratio"] = total["ratio_sum"] / total["ratios"]
    return metrics
