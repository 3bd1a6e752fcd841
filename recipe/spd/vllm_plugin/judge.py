"""Decisions of a scorer on the rows of a vLLM step, and their counts."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from loguru import logger
from torch import nn

from recipe.spd.scorer.heads import logit_features

COUNTS = ("matched", "judged", "let_through")  # as the server names them; let_through: accepted by the scorer
KEPT_REQUESTS = 4096  # finished requests whose counts can still be asked for
PENDING_STEPS = 256  # steps whose counts wait on the device: copying them each step would stall it
RAISED = 1e4  # above the largest logit: certain at any temperature in use, and finite when divided by it


def threshold_of(extra_args: Mapping[str, Any] | None, default: float) -> float:
    """A request's threshold from its `vllm_xargs`: infinite (exact acceptance) for `spd: 0`.

    A value that is no number means exact acceptance too: an error here would end the engine, not the request.
    """
    given = extra_args or {}
    if str(given.get("spd", 1)).lower() in ("0", "0.0", "false", "off"):
        return math.inf
    threshold = given.get("spd_threshold", default)
    try:
        value = float(threshold)
    except (TypeError, ValueError):
        value = math.nan
    if math.isnan(value):
        logger.warning("spd_threshold={!r} is no number; this request is not judged.", threshold)
        return math.inf
    return value


@dataclass
class Decisions:
    """What was decided on N rows of a step; a row has a draft token, or none."""

    request: torch.Tensor  # [N] int64, its number in the step
    position: torch.Tensor  # [N] int64, from 0 in the request's draft
    matched: torch.Tensor  # [N] bool: the draft token is the target's choice
    judged: torch.Tensor  # [N] bool: a mismatch of a request that has a threshold
    accepted: torch.Tensor  # [N] bool: judged, and the scorer accepts it


@dataclass
class Step:
    """What a worker passes to its sampler about a step of R requests; the sampler adds its decisions."""

    requests: Sequence[str]
    thresholds: torch.Tensor  # [R] float32 on the device
    judges: bool  # some request has a finite threshold
    states: Sequence[torch.Tensor]  # each [rows, H]: the output layer's input; then, if set, after spd.state_layer
    decisions: list[Decisions] = field(default_factory=list)


class ServedJudge:
    """Raises the logits of accepted mismatches, so that vLLM's own sampling accepts them.

    Of a step: `begin`, then `accept_by_raising_logits` for each part of its rows, then `finish`. head: the scorer's,
    called with [N, H] instead of [B, g, H], returns z [N]; embed: ids [N] -> the target's embeddings [N, H].
    """

    def __init__(
        self, head: nn.Module, embed: Callable[[torch.Tensor], torch.Tensor], threshold: float, device: torch.device
    ) -> None:
        self.head, self.embed, self.threshold, self.device = head, embed, threshold, device
        self.reads_logits = bool(getattr(head, "values", 0))
        self.thresholds: dict[str, float] = {}  # of running requests
        self.counts: OrderedDict[str, list[int]] = OrderedDict()  # of running and of recently finished requests
        self.totals = [0] * len(COUNTS)
        self.step: Step | None = None
        self._pending: list[tuple[Sequence[str], torch.Tensor]] = []

    def register_requests(self, scheduler_output: Any) -> None:
        """Take in the requests that start with this step, and forget the finished ones' thresholds."""
        for request_id in scheduler_output.finished_req_ids:
            self.thresholds.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args if new.sampling_params else None
            self.thresholds[new.req_id] = threshold_of(extra, self.threshold)

    def begin(self, requests: Sequence[str], *states: torch.Tensor) -> None:
        """Announce the rows of a step with drafts; `requests` in the order of the logits' rows."""
        values = [self.thresholds.get(request_id, math.inf) for request_id in requests]
        thresholds = torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)
        self.step = Step(list(requests), thresholds, min(values) < math.inf, states)

    def accept_by_raising_logits(
        self, logits: torch.Tensor, rows: torch.Tensor, draft: torch.Tensor, request: torch.Tensor,
        position: torch.Tensor,
    ) -> None:  # fmt: skip
        """Raise, in place, the draft token's logit in the rows that the scorer accepts.

        logits [N, V] float32 after grammar and forbidden words (-inf is never raised); rows [N] int64, the rows of the
        step's states that gave them; draft [N] ids, -1 for no draft; request, position [N] as in Decisions.
        """
        step = self.step
        target = logits.argmax(-1)
        drafted = draft >= 0
        matched = draft == target
        accepted = judged = torch.zeros_like(matched)
        if step.judges:
            ids = draft.clamp(min=0).long()  # z of rows without a draft is not used
            # A draft token is the input of the next row, which has the state over it. The last row has no draft.
            over_draft = (rows + 1).clamp(max=len(step.states[0]) - 1)
            more = [step.states[0][over_draft]]
            for inner in step.states[1:]:
                more += [inner[rows], inner[over_draft]]
            given = {"values": logit_features(logits, ids)} if self.reads_logits else {}
            z = self.head(step.states[0][rows], self.embed(ids), self.embed(target), *more, **given).float()
            threshold = step.thresholds[request]
            judged = drafted & ~matched & (threshold < math.inf)
            draft_logits = logits.gather(1, ids[:, None]).squeeze(1)
            accepted = judged & (z > threshold) & (draft_logits > -math.inf)
            raised = torch.where(accepted, logits.amax(-1) + RAISED, draft_logits)
            logits.scatter_(1, ids[:, None], raised[:, None])
        step.decisions.append(Decisions(request, position, matched & drafted, judged, accepted))

    def finish(self, n_kept: torch.Tensor) -> None:
        """Count the decisions on the first `n_kept` [R] draft tokens of each request, which it keeps, and as judged the
        next one, which was rejected."""
        step, self.step = self.step, None
        if step is None or not step.decisions:
            return
        request, position, matched, judged, accepted = (
            torch.cat([getattr(part, f.name) for part in step.decisions]) for f in fields(Decisions)
        )
        limit = n_kept[request]
        kept, reached = position < limit, position <= limit
        counted = torch.stack([matched & kept, judged & reached, accepted & kept], dim=1)  # as in COUNTS
        sums = torch.zeros(len(step.requests), len(COUNTS), device=counted.device)
        self._pending.append((step.requests, sums.index_add_(0, request, counted.float())))
        if len(self._pending) >= PENDING_STEPS:
            self._flush_counts()

    def _flush_counts(self) -> None:
        pending, self._pending = self._pending, []
        for requests, sums in pending:
            for request_id, values in zip(requests, sums.long().tolist(), strict=True):
                known = self.counts.setdefault(request_id, [0] * len(COUNTS))
                for i, value in enumerate(values):
                    known[i] += value
                    self.totals[i] += value
        finished = [r for r in self.counts if r not in self.thresholds]
        for request_id in finished[: max(0, len(finished) - KEPT_REQUESTS)]:
            del self.counts[request_id]

    def report(self, response_id: str | None = None) -> dict[str, Any]:
        """Totals since the start, by name; with `response_id` {request: its counts by name}, of all where it is empty.
        """
        self._flush_counts()
        if response_id is None:
            return dict(zip(COUNTS, self.totals, strict=True))
        chosen = of_response(self.counts, response_id) if response_id else self.counts
        return {request: dict(zip(COUNTS, counts, strict=True)) for request, counts in chosen.items()}


def of_response(counts: Mapping[str, Any], response_id: str) -> dict[str, Any]:
    """The entries of {request id: counts} whose requests vLLM made for one response.

    The beginning of a response's id, such as "cmpl", must not list the requests of other clients.
    """
    # 1_ID-0-5f5f5f5f: of an answer (with n > 1), the response, a prompt (of completions), and 8 random digits.
    own = re.compile(rf"(\d+_)?{re.escape(response_id)}(-[0-9a-f]{{1,8}}){{0,2}}")
    return {request: entry for request, entry in counts.items() if own.fullmatch(request)}
