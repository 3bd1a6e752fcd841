"""Decisions and counts of a served scorer, without vLLM."""

import math
from types import SimpleNamespace

import pytest
import torch

from recipe.spd.vllm_plugin.judge import ServedJudge, threshold_of

VOCABULARY, HIDDEN = 6, 3


class Head(torch.nn.Module):
    """z is the first entry of the state before the draft token, or of the one over it."""

    def __init__(self, over=False):
        super().__init__()
        self.over = over

    def forward(self, hidden, draft, target, after):
        assert draft.shape == target.shape == hidden.shape == after.shape
        return (after if self.over else hidden)[:, 0]


def judge(threshold=0.0, over=False):
    return ServedJudge(Head(over), torch.nn.Embedding(VOCABULARY, HIDDEN), threshold, torch.device("cpu"))


def started(judge, **requests):
    """Requests by name with their xargs, taken in as by a worker."""
    new = [SimpleNamespace(req_id=r, sampling_params=SimpleNamespace(extra_args=x)) for r, x in requests.items()]
    judge.register_requests(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=new))
    return judge


def rows_of(z):
    return torch.tensor([[value, 0.0, 0.0] for value in z])


@pytest.mark.parametrize(
    "given, expected",
    [(None, 1.5), ({}, 1.5), ({"spd_threshold": -2}, -2.0), ({"spd": 0}, math.inf), ({"spd": "0"}, math.inf),
     ({"spd": 1, "spd_threshold": "0.5"}, 0.5), ({"spd_threshold": "high"}, math.inf),
     ({"spd_threshold": [1]}, math.inf), ({"spd_threshold": "nan"}, math.inf)],
)  # fmt: skip
def test_a_request_sets_its_threshold_and_an_unreadable_one_means_exact_acceptance(given, expected):
    assert threshold_of(given, 1.5) == expected
    assert threshold_of({}, math.nan) == math.inf


def test_only_accepted_mismatches_are_raised_and_forbidden_tokens_never():
    judging = started(judge(), a={}, b={"spd_threshold": 5.0}, c={"spd": 0})
    # a: match, accepted, rejected, forbidden, no draft; b: below its threshold, above it; c: opted out
    draft = torch.tensor([0, 1, 1, 2, -1, 1, 1, 1])
    request, position = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 0])
    logits = torch.zeros(8, VOCABULARY)
    logits[:, 0] = 1.0  # the target's choice
    logits[3, 2] = -math.inf
    before = logits.clone()
    judging.begin(["a", "b", "c"], rows_of([9, 1, -1, 9, 9, 4, 6, 9]))
    judging.accept_by_raising_logits(logits, torch.arange(8), draft, request, position)
    raised = (logits != before).nonzero().tolist()
    assert raised == [[1, 1], [6, 1]]
    assert logits.argmax(-1).tolist() == [0, 1, 0, 0, 0, 0, 1, 0]


def test_the_state_over_a_draft_token_is_in_the_next_row_of_the_step():
    """Two requests with two draft tokens and the bonus row each: rows 0, 1, 2 and 3, 4, 5 of the states."""
    judging = started(judge(over=True), a={}, b={})
    judging.begin(["a", "b"], rows_of([9, -1, 5, 9, 5, -1]))
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 0] = 1.0
    draft, request, position = torch.tensor([1, 1, 1, 1]), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    rows = torch.tensor([0, 1, 3, 4])  # states over the drafts: -1, 5, 5, -1
    judging.accept_by_raising_logits(logits, rows, draft, request, position)
    assert logits.argmax(-1).tolist() == [0, 1, 1, 0]


def test_counts_end_with_the_first_rejection_and_stay_after_the_request():
    judging = started(judge(), first={}, second={})
    draft = torch.tensor([0, 1, 1, 1, 0, 1, 0])
    request, position = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    logits = torch.zeros(7, VOCABULARY)
    logits[:, 0] = 1.0
    judging.begin(["first", "second"], rows_of([0, 1, -1, 1, 0, 1, 0]))
    judging.accept_by_raising_logits(logits, torch.arange(7), draft, request, position)
    judging.finish(torch.tensor([2, 3]))  # first: rejected at its third token; second: all accepted
    assert judging.report() == {"matched": 3, "judged": 3, "let_through": 2}
    judging.register_requests(SimpleNamespace(finished_req_ids={"first"}, scheduled_new_reqs=[]))
    assert judging.report("first") == {"first": {"matched": 1, "judged": 2, "let_through": 1}}
    assert judging.report("second") == {"second": {"matched": 2, "judged": 1, "let_through": 1}}
    assert judging.report("third") == {} == judging.report("fir")
    assert set(judging.report("")) == {"first", "second"}
    judging.counts |= {name: [1, 0, 0] for name in ("0_both-1f", "1_both-1f", "0_bothers", "x_both")}
    assert set(judging.report("both")) == {"0_both-1f", "1_both-1f"}  # of a request for two answers
