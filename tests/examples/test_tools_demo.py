"""The tools demo: calculator, reward, training rows, commands as their entries read them, criteria. Nothing is trained.

Not covered: the trained figures (`make demo-tools` shows them).
"""

import asyncio
import json
import random

import pytest
from omegaconf import OmegaConf

from examples.spd_arithmetic.train_models import IGNORED
from examples.tools_arithmetic import demo, make_start
from examples.tools_arithmetic.calculator import calculate
from examples.tools_arithmetic.reward import compute_score
from tests.examples.test_grpo_demo import trained_config
from verl.agents.agent_loop.tool_parser import HermesToolParser
from verl.agents.message_encoder import MessageEncoder
from verl.agents.tools.runner import ToolRunner
from verl.agents.tools.tool_registry import initialize_tools_from_config


def test_the_calculator():
    assert [calculate(text) for text in ("12 * 34", "2 + 3 * 4", "(2 + 3) * 4", "5 - 7")] == [408, 14, 20, -2]
    for text in ("2 ** 9", "__import__('os')", "1 / 0", "1.5 + 1", "True + 1", "", "9*" * 60 + "9"):
        with pytest.raises(ValueError):
            calculate(text)


def test_a_training_row_is_what_a_conversation_with_the_tool_is():
    tokenizer = make_start.build_tokenizer()
    ids, rng, made = tokenizer.get_vocab(), random.Random(0), set()
    encoder = MessageEncoder(tokenizer, [tokenizer.eos_token_id])
    runner = ToolRunner(initialize_tools_from_config(f"{demo.HERE}/tools.yaml"))
    for _ in range(200):
        tokens, labels = make_start.training_row(rng, ids, set())
        words = tokenizer.convert_ids_to_tokens(tokens)
        asked = words[1 : words.index("?")]
        prompt = encoder.prompt([{"role": "user", "content": " ".join(asked)}])
        assert tokens[: len(prompt)] == prompt and set(labels[: len(prompt)]) == {IGNORED}
        made.add("<tool_call>" in words)
        if "<tool_call>" not in words:
            continue
        end = words.index("<eos>") + 1
        _, (call,) = HermesToolParser(tokenizer).parse(tokenizer.decode(tokens[len(prompt) : end]))

        async def answered(call=call):
            async with runner.conversation() as tools:
                return await tools.call(call.name, call.arguments)

        result = asyncio.run(answered())
        assert result.failure is None
        given = encoder.encode_appended([{"role": "tool", "content": result.response.text}])
        assert tokens[end : end + len(given)] == given and set(labels[end : end + len(given)]) == {IGNORED}
        assert labels[end + len(given) :] == tokens[end + len(given) :] and words[-1] == "<eos>"
    assert made == {True, False}


def test_questions_are_in_one_split_only():
    splits = make_start.split_products(0)
    keys = {name: {tuple(sorted(pair)) for pair in pairs} for name, pairs in splits.items()}
    assert len(keys["val"]) == 400 and not keys["val"] & keys["train"]
    row = make_start.row("val", 0, 12, 34)
    assert (row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) == ("1 2 * 3 4", "408")


@pytest.mark.parametrize(
    ("text", "score", "called"),
    [("answer 4 0 8", 1, 0), ("answer 4 0 9", 0, 0), ("<tool_call> x </tool_call> result 4 0 8 . answer 4 0 8", 1, 1),
     ("answer 4 0 8 answer 1", 0, 0), ("4 0 8", 0, 0)],
)  # fmt: skip
def test_reward(text, score, called):
    assert compute_score("products", text, "408") == {"score": score, "acc": score, "called": called}


def test_both_runs_differ_only_in_the_tool(tmp_path):
    commands = [demo.training_command(tmp_path, tmp_path / "run", 10, 0, tools) for tools in (True, False)]
    tools, single = map(trained_config, commands)
    assert tools.actor_rollout_ref.rollout.agent.default_agent_loop == "tool_agent"
    OmegaConf.set_struct(tools, False)
    OmegaConf.set_struct(single, False)
    for key in ("agent", "multi_turn"):
        del tools.actor_rollout_ref.rollout[key], single.actor_rollout_ref.rollout[key]
    tools.data.tool_config_path = None
    assert tools == single


def test_criteria_and_metrics_by_step(tmp_path):
    met = {name: c.met for name, c in demo.criteria_of({0: 0.03, 80: 0.9}, {0: 0.03, 80: 0.7}, 899).items()}
    assert met == {"gain": True, "seconds": True}
    missed = {name: c.met for name, c in demo.criteria_of({0: 0.03, 80: 0.8}, {0: 0.03, 80: 0.7}, 901).items()}
    assert missed == {"gain": False, "seconds": False}
    rows = [{"step": 0, "data": {demo.ACCURACY: 0.1}}, {"step": 1, "data": {"x": 1}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert demo.by_step(tmp_path, demo.ACCURACY) == {0: 0.1}
