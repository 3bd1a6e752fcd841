"""Whose text is scored: built-in rules and reward models judge what the model wrote, not what its tools answered."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.columns import object_columns
from tests.helpers.models import make_tokenizer
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward import served
from verl.reward.managers import DAPORewardManager, NaiveRewardManager
from verl.reward.managers.batch import BatchRewardManager
from verl.reward.rules import default_compute_score
from verl.reward.sandbox import SandboxConfig
from verl.roles.reward_model import RewardModelWorker
from verl.trainer.main_generation import answers
from verl.trainer.run.samples import sample_rows

RIGHT = "#### 7 \\boxed{7} <answer> 7 </answer> Answer: 7"
TRUTHS = {"openai/gsm8k": "7", "lighteval/MATH": "7", "math_dapo": "7", "searchR1_nq": {"target": ["7"]}}


def texts(*turns, generated=(True,)):
    """What extra_info has of a response with these turns."""
    kinds = ["generated" if own else "given" for own in generated]
    own = "\n".join(text for text, kind in zip(turns, kinds, strict=True) if kind == "generated")
    return {"model_text": own, "response_turns": [{"text": t, "kind": k} for t, k in zip(turns, kinds, strict=True)]}


def conversation(turns, tokenizer, source, masked=True):
    """A row whose turns are the model's and a tool's in turn; the model's end with <eos>."""
    ids = [tokenizer(f"{text} <eos>" if i % 2 == 0 else text)["input_ids"] for i, text in enumerate(turns)]
    mask = [1 - i % 2 for i, turn in enumerate(ids) for _ in turn]
    tensors = {"prompts": [[1]], "responses": [sum(ids, [])], "attention_mask": [[1] * (1 + len(mask))]}
    tensors |= {"response_mask": [mask]} if masked else {}
    non_tensors = object_columns(data_source=[source], reward_model=[{"ground_truth": TRUTHS.get(source)}])
    return DataProto.from_dict({name: torch.tensor(rows) for name, rows in tensors.items()}, non_tensors)


@pytest.mark.parametrize("source", TRUTHS)
@pytest.mark.parametrize("manager", [NaiveRewardManager, DAPORewardManager, BatchRewardManager])
def test_rules_judge_what_the_model_wrote_and_not_what_its_tools_answered(source, manager):
    tokenizer = make_tokenizer([*RIGHT.split(), "look", "I", "don't", "know"])
    asked, told = ["I don't know", RIGHT, ""], [RIGHT, "look", "I don't know"]
    wrong = -1.0 if source == "math_dapo" else 0.0
    for settings, turns, score in (({}, asked, wrong), ({}, told, 1.0), ({"judged_text": "conversation"}, asked, 1.0)):
        for function in (default_compute_score, partial(default_compute_score, sandbox=SandboxConfig())):
            rule = manager(tokenizer, 0, function)
            rule.settings = RewardModelConfig(**settings)
            assert rule(conversation(turns, tokenizer, source)).sum().item() == score
    rule = NaiveRewardManager(tokenizer, 0, default_compute_score)
    assert asyncio.run(rule.run_single(conversation(asked, tokenizer, source)))["reward_score"] == wrong


@pytest.mark.parametrize("masked", [True, False])
def test_a_function_of_ones_own_gets_the_conversation_and_whose_text_is_whose(masked):
    tokenizer, seen = make_tokenizer(["a", "b", "c"]), []
    manager = NaiveRewardManager(tokenizer, 0, lambda **arguments: seen.append(arguments) or 0)
    manager(conversation(["a b", "c", "b"], tokenizer, "x", masked))
    known = texts("a b", "c", "b", generated=[True, False, True]) if masked else texts("a b c b")
    assert seen[0]["solution_str"] == "a b c b"
    assert seen[0]["extra_info"] == {"num_turns": None, "rollout_reward_scores": {}, **known}


@pytest.mark.parametrize(("judged", "read"), [("model", "p a\nb"), ("conversation", "p a c b")])
def test_reward_models_read_what_the_model_wrote(judged, read, monkeypatch):
    tokenizer, asked = make_tokenizer(["p", "a", "b", "c"]), []
    tokenizer.chat_template = "{{ messages | map(attribute='content') | join(' ') }}"
    data = conversation(["a", "c", "b"], tokenizer, "x")
    data.non_tensor_batch |= object_columns(raw_prompt=[[{"role": "user", "content": "p"}]])
    settings = RewardModelConfig(judged_text=judged, max_length=8)

    async def classify(url, body, seconds):
        asked.append(body["input"])
        return {"data": [{"probs": [0.5]}]}

    monkeypatch.setattr(served, "post_json", classify)
    served.ServedRewardManager(tokenizer, settings, "host:1", tokenizer, "data_source")(data)
    worker = SimpleNamespace(settings=settings, policy_tokenizer=tokenizer, tokenizer=tokenizer)
    ids = RewardModelWorker._rewritten(worker, data).batch["input_ids"][0].tolist()
    assert asked == [read] and tokenizer.decode([i for i in ids if i]) == read.replace("\n", " ")


def test_markers_that_are_special_tokens_reach_the_reward():
    words = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{7}", "a"]
    tokenizer, seen = make_tokenizer(words), []
    tokenizer.add_special_tokens({"additional_special_tokens": words[:4]})
    manager = NaiveRewardManager(tokenizer, 0, lambda solution_str, **rest: seen.append(solution_str) or 0)
    manager(conversation(["<think> a </think> a"], tokenizer, "x"))
    assert seen == ["<think> a </think> a"]
    rules = {"hiyouga/geometry3k": "<think> a </think> \\boxed{7}", "searchR1_nq": "<answer> a </answer>"}
    for source, text in rules.items():
        row = conversation([text], tokenizer, source)
        row.non_tensor_batch["reward_model"][0] = {"ground_truth": "7" if "geo" in source else {"target": ["a"]}}
        assert NaiveRewardManager(tokenizer, 0, default_compute_score)(row).sum().item() == pytest.approx(1.0)


def test_markers_are_in_dumps_and_in_generated_answers():
    tokenizer = make_tokenizer(["<think>", "</think>", "a"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    row = conversation(["<think> a </think> a"], tokenizer, "x")
    (dumped,) = sample_rows(row, tokenizer, [1.0], {}, 1)
    assert (dumped["input"], dumped["output"]) == ("", "<think> a </think> a")
    rollout = SimpleNamespace(
        model_config=SimpleNamespace(path=None), config=SimpleNamespace(stop_token_ids=None, ignore_eos=False),
        generate_sequences=lambda batch: row,
    )  # fmt: skip
    prompts = [{"input_ids": torch.ones(1, dtype=torch.int64)}]
    assert answers(rollout, prompts, SimpleNamespace(n_samples=1), tokenizer) == ([["<think> a </think> a"]], 0)
