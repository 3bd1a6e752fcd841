"""Reward managers: where the score stands, what functions are given, that errors name the row."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import rewards
from tests.helpers.columns import object_columns
from tests.helpers.configs import compose_ppo
from tests.helpers.logs import logged
from tests.helpers.models import make_tokenizer
from tests.reward.test_judged_text import texts
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.loading import get_custom_reward_fn, load_reward_manager
from verl.reward.managers import DAPORewardManager, NaiveRewardManager, PrimeRewardManager, naive
from verl.reward.managers.batch import BatchRewardManager
from verl.reward.pool import ExternFunction, Failure
from verl.reward.rows import RewardError, Row, drop_failed, parse_results
from verl.reward.rules import default_compute_score, gsm8k
from verl.reward.sandbox import SandboxConfig
from verl.trainer.ppo.reward import compute_reward

TOKENIZER = make_tokenizer()


def batch(answers=("1 2", "7"), response_mask=None, width=4, **columns):
    """Prompts 'a b' (one pad before), answers as text, right-padded to `width`."""
    prompt = [0, *TOKENIZER("a b")["input_ids"]]
    ids = [TOKENIZER(answer)["input_ids"] for answer in answers]
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    valid = torch.tensor([[0, 1, 1] + [1] * len(row) + [0] * (width - len(row)) for row in ids])
    tensors = {"prompts": torch.tensor([prompt] * len(ids)), "responses": responses, "attention_mask": valid}
    if response_mask is not None:
        tensors["response_mask"] = torch.tensor(response_mask)
    rows = range(len(ids))
    non_tensors = object_columns(
        data_source=["x"] * len(ids),
        reward_model=[{"ground_truth": str(i)} for i in rows],
        extra_info=[{"index": 10 + i} for i in rows],
    )
    return DataProto.from_dict(tensors=tensors, non_tensors={**non_tensors, **columns})


def length_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str.split())


def test_a_score_stands_on_the_last_counted_position_or_valid_token():
    # Of row 0 only the first of its two tokens is counted; of row 1 none, so that the last valid token takes it.
    for mask, first in ((None, [0, 2, 0, 0]), ([[1, 0, 0, 0], [0, 0, 0, 0]], [2, 0, 0, 0])):
        scores = NaiveRewardManager(TOKENIZER, 0, length_score)(batch(response_mask=mask))
        assert scores.tolist() == [first, [1, 0, 0, 0]]


def test_function_sees_text_truth_and_extra_info():
    seen = []

    def spy(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
        seen.append((data_source, solution_str, ground_truth, extra_info, bonus))
        return 0

    tools = np.array([{"search": [0.5]}, {}], dtype=object)
    NaiveRewardManager(TOKENIZER, 0, spy, bonus=3)(batch(__num_turns__=np.array([2, 4]), reward_scores=tools))
    assert seen == [
        ("x", "1 2", "0", {"index": 10, "num_turns": 2, "rollout_reward_scores": {"search": [0.5]}, **texts("1 2")}, 3),
        ("x", "7", "1", {"index": 11, "num_turns": 4, "rollout_reward_scores": {}, **texts("7")}, 3),
    ]


def test_dict_results_become_aligned_extras():
    def score(solution_str, **kw):
        return {"score": 1.0, "acc": True} if solution_str == "7" else {"score": 0.5}

    result = NaiveRewardManager(TOKENIZER, 0, score)(batch(), return_dict=True)
    assert result["reward_extra_info"] == {"score": [0.5, 1.0], "acc": [None, True]}
    assert result["reward_tensor"].sum(-1).tolist() == [0.5, 1.0]
    assert NaiveRewardManager(TOKENIZER, 0, length_score)(batch(), return_dict=True)["reward_extra_info"] == {}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_names_the_row_and_keeps_its_cause(kind):
    def fails(solution_str, **kw):
        if solution_str == "7":
            raise KeyError("boom")
        return 1.0

    async def fails_later(solution_str, **kw):
        return fails(solution_str)

    manager = NaiveRewardManager(TOKENIZER, 0, fails if kind == "sync" else fails_later)
    with pytest.raises(RewardError, match=r"row 1 \(data_source='x', index=11\).*KeyError: 'boom'") as caught:
        manager(batch())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "result", [None, "1.0", float("nan"), 10**400, {"acc": 1.0}, {"acc": 1.0, 1: 0.5}, {"score": "1.0"}]
)
def test_what_is_no_score_is_refused(result):
    with pytest.raises(RewardError, match="row 0 .* returned"):
        NaiveRewardManager(TOKENIZER, 0, lambda **kw: result)(batch())


def test_a_row_without_a_ground_truth_is_named():
    columns = object_columns(reward_model=[{"ground_truth": "0"}, None])  # row 1 is of a file without the column
    with pytest.raises(RewardError, match="row 1: column .reward_model. has no .ground_truth.; it is None"):
        NaiveRewardManager(TOKENIZER, 0, length_score)(batch(**columns))


def test_given_scores_are_handed_back():
    data = batch()
    data.batch["rm_scores"] = torch.ones(2, 4)
    assert torch.equal(NaiveRewardManager(TOKENIZER, 0, length_score)(data), torch.ones(2, 4))
    data.meta_info["reward_extra_keys"] = ["data_source"]
    extras = BatchRewardManager(TOKENIZER, 0)(data, return_dict=True)["reward_extra_info"]
    assert extras["data_source"].tolist() == ["x", "x"]


def test_batch_manager_calls_once_with_plural_names_and_tensors():
    calls = []

    def score(data_sources, solution_strs, ground_truths, extra_infos, prompt_ids, response_ids, attention_mask,
              batch_tensors, alpha):  # fmt: skip
        calls.append((data_sources, solution_strs, ground_truths, extra_infos, prompt_ids, response_ids, alpha))
        assert attention_mask.shape == (2, 7) and batch_tensors["responses"].shape == (2, 4)
        return [0.25, {"score": 0.5, "acc": 1}]

    result = BatchRewardManager(TOKENIZER, 0, score, alpha=2)(batch(), return_dict=True)
    prompt = TOKENIZER("a b")["input_ids"]
    ids = [TOKENIZER("1 2")["input_ids"], TOKENIZER("7")["input_ids"]]
    infos = ({"index": i, "num_turns": None, "rollout_reward_scores": {}} for i in (10, 11))
    extra_infos = [{**info, **texts(text)} for info, text in zip(infos, ("1 2", "7"), strict=True)]
    assert calls == [(["x", "x"], ["1 2", "7"], ["0", "1"], extra_infos, [prompt] * 2, ids, 2)]
    assert result["reward_tensor"].sum(-1).tolist() == [0.25, 0.5]
    assert result["reward_extra_info"]["acc"] == [None, 1]


def test_batch_manager_errors():
    def raises(data_sources, **kw):
        raise OSError("no disk")

    with pytest.raises(RewardError, match=r"batch of 2 rows \(data_source: x\).*OSError: no disk"):
        BatchRewardManager(TOKENIZER, 0, raises)(batch())
    with pytest.raises(RewardError, match="1 scores for 2 rows"):
        BatchRewardManager(TOKENIZER, 0, lambda data_sources, **kw: [1.0])(batch())


BATCH_REWARDS = """
import os, time

def ids(data_sources, solution_strs, ground_truths, extra_infos, batch_tensors, **more):
    return [float(os.getpid()), float(batch_tensors["responses"].sum())]

async def later(data_sources, **more):
    return [3.0] * len(data_sources)

def never(data_sources, **more):
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def batch_rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "batch_rewards.py"
    file.write_text(BATCH_REWARDS)
    return lambda name: BatchRewardManager(TOKENIZER, 0, ExternFunction(str(file), name))


@pytest.mark.process
def test_a_batch_function_known_by_file_runs_in_a_process_with_the_tensors(batch_rewards):
    data = batch()
    pid, total = batch_rewards("ids").verify(data)
    assert pid != os.getpid() and total == float(data.batch["responses"].sum())
    assert batch_rewards("later").verify(data) == [3.0, 3.0]


@pytest.mark.process
def test_a_batch_function_that_hangs_is_killed_and_counted(batch_rewards):
    manager = batch_rewards("never")
    manager.settings = RewardModelConfig(batch_timeout=1.0)
    with pytest.raises(RewardError, match=r"batch of 2 rows .* took longer than 1 s .*reward_model.batch_timeout=1\)"):
        manager(batch())
    manager.settings = RewardModelConfig(batch_timeout=1.0, error="drop")
    assert manager(batch(), return_dict=True)["reward_extra_info"]["__lost__"] == ["timeout", "timeout"]


def test_without_workers_a_function_by_file_runs_here(batch_rewards):
    manager = batch_rewards("ids")
    manager.settings = RewardModelConfig(num_workers=0)
    assert manager.verify(batch())[0] == os.getpid()


@pytest.mark.process
def test_custom_functions_from_a_file_with_bound_kwargs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n    return bonus\n"
        "async def judge(solution_str, bonus=0, **kw):\n    return len(solution_str.split()) + bonus\n"
    )
    given = (f"custom_reward_function.path={file}", "+custom_reward_function.reward_kwargs.bonus=4")
    mine, judge = (compose_ppo(*given, f"custom_reward_function.name={name}") for name in ("mine", "judge"))
    assert get_custom_reward_fn(mine)("x", "y", "z", bonus=1) == 4
    scores, extras = compute_reward(batch(), load_reward_manager(mine, TOKENIZER, num_examine=0))
    assert scores.sum(-1).tolist() == [4, 4] and extras == {}
    assert load_reward_manager(judge, TOKENIZER, 0)(batch()).sum(-1).tolist() == [6, 5]


@pytest.mark.parametrize(
    "text, truth, expected",
    [
        ("#### 1,234.", "1234", 1.0),
        ("#### $5.0", "5", 1.0),
        ("#### 1 then #### 72", "72", 1.0),
        ("the answer is 72", "72", 0.0),
    ],
)
def test_gsm8k(text, truth, expected):
    assert default_compute_score("openai/gsm8k", text, truth) == expected


def test_gsm8k_flexible_takes_the_last_number():
    assert gsm8k.extract_solution("first 3, then 4.5 apples", "flexible") == "4.5"
    assert gsm8k.compute_score("#### 3", "4", format_score=0.1) == 0.1
    with pytest.raises(ValueError, match="method='lax'"):
        gsm8k.extract_solution("x", "lax")


def test_examples_are_logged_once_a_source():
    with logged("INFO") as lines:
        NaiveRewardManager(TOKENIZER, 1, length_score)(batch())
    assert len(lines) == 1 and "[prompt] a b" in lines[0] and "[score] 2" in lines[0]


REWARDS = "pkg://tests.helpers.rewards"


def truths(*texts):
    """A batch of answers '1 2', where the truth says what the reward function does."""
    columns = object_columns(reward_model=[{"ground_truth": text} for text in texts])
    return batch(answers=("1 2",) * len(texts), **columns)


def manager(name="score", cls=NaiveRewardManager, **settings):
    made = cls(TOKENIZER, 0, ExternFunction(REWARDS, name))
    made.settings = RewardModelConfig(**{"item_timeout": 2.0, **settings})
    return made


@pytest.mark.process
def test_a_row_that_hangs_is_killed_and_named():
    said = (
        r"row 1 \(data_source='x', index=11\): "
        r"reward function score \(tests/helpers/rewards.py:8\) took longer than 2 s and was killed. "
        r"1 of 2 rows have no score \(1 took too long\); reward_model.error=drop"
    )
    with pytest.raises(RewardError, match=said):
        manager()(truths("", "hang"))


@pytest.mark.parametrize(("fatal", "drops"), [(False, False), (True, False), (True, True)])
def test_dropping_rows_is_advised_only_where_it_helps(fatal, drops):
    row = Row(0, "x", [], [], "", {})
    with pytest.raises(RewardError) as error:
        parse_results([row], [Failure("error", "raised it", fatal)], drops, manager)
    assert ("reward_model.error=drop" in str(error.value)) != fatal


@pytest.mark.parametrize("given", [("reward_model.reward_manager=naive",), ("reward_manager.name=prime",)])
def test_the_manager_for_overlong_answers_is_named_by_the_key_that_decides(given):
    buffer = ("reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=4")
    with pytest.raises(ValueError, match="Set reward_manager.name=dapo"):
        load_reward_manager(compose_ppo(*given, *buffer), TOKENIZER, 0)
    made = load_reward_manager(compose_ppo(*given, *buffer, "reward_manager.name=dapo"), TOKENIZER, 0)
    assert isinstance(made, DAPORewardManager) and made.buffer["len"] == 4


@pytest.mark.process
@pytest.mark.parametrize("cls", [NaiveRewardManager, PrimeRewardManager, DAPORewardManager])
def test_rows_without_a_score_are_marked_and_left_out(cls):
    dropping = manager(cls=cls, error="drop", num_workers=2)
    data = truths("", "hang", "raise", "", "none")
    result = dropping(data, return_dict=True)
    assert result["reward_extra_info"]["__lost__"] == ["", "timeout", "error", "", "error"]
    scores, extras = compute_reward(data, dropping)
    left, scores, extras, failed = drop_failed(data, scores, extras)
    assert scores.sum(-1).tolist() == [2.0, 2.0] and extras["acc"] == [1.0, 1.0] and "__lost__" not in extras
    assert [info["index"] for info in left.non_tensor_batch["extra_info"]] == [10, 13]
    assert failed == {"timeout": 1, "error": 2} and failed.total() + len(left) == len(data)


@pytest.mark.process
def test_prime_grades_in_parallel_and_refuses_what_cannot_be_pickled():
    prime = PrimeRewardManager(TOKENIZER, 0, rewards.process)
    prime.settings = RewardModelConfig(num_workers=4)
    workers = prime(batch(answers=("1",) * 8)).sum(-1).tolist()
    assert len(set(workers)) == 4
    assert PrimeRewardManager.workers(RewardModelConfig()) >= 1
    with pytest.raises(Exception, match="pickle"):
        PrimeRewardManager(TOKENIZER, 0, lambda **kw: 1.0)(batch())


@pytest.mark.process
def test_prime_verifies_a_batch_and_keeps_the_scores_in_it():
    data = truths("", "raise")
    verified = manager(cls=PrimeRewardManager, error="drop", num_workers=1).verify(data)
    assert verified == pytest.approx([2.0, float("nan")], nan_ok=True)
    assert data.batch["acc"].tolist() == pytest.approx(verified, nan_ok=True)
    with pytest.raises(RewardError, match=r"row 1 .*KeyError: 'boom'"):
        manager(cls=PrimeRewardManager, num_workers=1).verify(data)
    data = batch()
    assert PrimeRewardManager(TOKENIZER, 0, rewards.slow).verify(data) == [1.0, 1.0] == data.batch["acc"].tolist()


@pytest.mark.process
def test_async_functions_share_the_time_and_fail_alone():
    dropping = manager("later", error="drop", num_workers=2)
    result = dropping(truths("", "", "hang", "raise", "", "", "", ""), return_dict=True)
    assert result["reward_extra_info"]["__lost__"] == ["", "", "timeout", "error", "", "", "", ""]
    assert result["reward_tensor"].sum(-1).tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


@pytest.mark.process
def test_an_async_function_that_blocks_fails_alone(monkeypatch):
    monkeypatch.setattr(naive, "_GRACE_S", 0.5)
    made = manager("blocking", num_workers=2)
    said = r"^row 2 \(.*index=12\): .* 1 of 6 rows have no score \(1 took too long\)"
    with pytest.raises(RewardError, match=said):
        made(truths("", "", "hang", "", "", ""))
    assert made._pool.restarts == 2 and made(truths("", "", "", "")).sum().item() == 4


@pytest.mark.process
def test_where_every_row_blocks_the_search_ends(monkeypatch):
    monkeypatch.setattr(naive, "_GRACE_S", 0.1)
    monkeypatch.setattr(naive, "_MAX_FAILURES", 2)
    dropping = manager("blocking", error="drop", num_workers=1, item_timeout=0.2)
    assert dropping(truths(*["hang"] * 6), return_dict=True)["reward_extra_info"]["__lost__"] == ["timeout"] * 6
    assert dropping._pool.restarts == 3  # the shard, then two rows


HOSTILE = "\\boxed{9^{9^{9^{9^{9}}}} - 9^{9^{9^{9^{8}}}}}"


@pytest.mark.process
@pytest.mark.parametrize(
    "source, settings, right",
    [
        ("lighteval/MATH", {"seconds": 3.0}, 1.0),
        pytest.param("hiyouga/geometry3k", {}, 0.9, marks=pytest.mark.slow),  # the rule's own limit, 10 s
    ],
)
def test_mathematics_without_end_is_a_wrong_answer_and_no_fault(source, settings, right, monkeypatch):
    texts = ["\\boxed{2+2}", HOSTILE, "\\boxed{\\frac{8}{2}}", "\\boxed\\frac{8}{2}"]
    made = NaiveRewardManager(TOKENIZER, 0, **settings)
    given_arguments = made.arguments
    monkeypatch.setattr(made, "arguments", lambda row: given_arguments(row) | {"solution_str": texts[row.index]})
    sources = np.array([source] * 4, dtype=object)

    def asked(truth):
        given = np.array([{"ground_truth": truth}] * 4, dtype=object)
        return made(batch(answers=("1",) * 4, reward_model=given, data_source=sources), return_dict=True)

    result = asked("4")
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx([right, 0, right, 0])
    assert "__lost__" not in result["reward_extra_info"] and made._pool.restarts == 0
    with pytest.raises(RewardError, match=r"row 0 .*the ground truth '\$' cannot be read as mathematics"):
        asked("$")


@pytest.mark.process
def test_an_environment_that_can_grade_nothing_is_no_dropped_row(tmp_path):
    file = tmp_path / "none.py"
    file.write_text(
        "from verl.reward.sandbox import SandboxUnavailable\n\n\n"
        "def compute_score(**kw):\n    raise SandboxUnavailable('this machine cannot')\n"
    )
    made = NaiveRewardManager(TOKENIZER, 0, ExternFunction(str(file), "compute_score"))
    made.settings = RewardModelConfig(error="drop")
    with pytest.raises(RewardError, match="SandboxUnavailable: this machine cannot"):
        made(batch())


def test_the_rule_rewards_get_the_sandboxes_of_the_configuration():
    limits = ("num_workers=2", "item_timeout=7.0", "error=drop", "sandbox_fusion.url=http://x/run_code",
              "sandbox_fusion.max_concurrent=128", "sandbox_fusion.memory_limit_mb=99", "sandbox.seconds=3.0")
    config = compose_ppo("reward_manager.name=prime", *(f"reward_model.{limit}" for limit in limits))
    made = load_reward_manager(config, TOKENIZER, 0)
    bound = made.compute_score.source[2]
    assert bound["sandbox_fusion_url"] == "http://x/run_code" and bound["memory_limit_mb"] == 99
    assert bound["concurrent_semaphore"].number == 128 // made.workers(made.settings)
    assert replace(bound["sandbox"], _target_="") == SandboxConfig(seconds=3.0)
    assert (made.settings.error, made.settings.item_timeout, type(made)) == ("drop", 7.0, PrimeRewardManager)
