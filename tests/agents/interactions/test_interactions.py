"""Interactions: the GSM8K partner by hand, and files that list interactions."""

import pytest

from verl.agents.interactions.base import BaseInteraction
from verl.agents.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.agents.interactions.interaction_registry import get_interaction_class, initialize_interactions_from_config

RIGHT = (True, "Your response is correct!", 1.0, {})
WRONG = (False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {})


def said(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


async def test_gsm8k_judges_the_last_assistant_message_strictly_and_forgets_the_instance():
    partner = Gsm8kInteraction({"name": "gsm8k"})
    first = await partner.start_interaction(ground_truth="72", split="train")
    other = await partner.start_interaction("fixed", ground_truth="5")
    assert other == "fixed" and first != other
    answers = [
        await partner.generate_response(first, said("q", content))
        for content in ("72", "#### 71", [{"type": "text", "text": "#### "}, {"type": "text", "text": "72"}], None)
    ]
    answers.append(await partner.generate_response(first, said("q", "#### 72", "are you sure?")))
    score = await partner.calculate_score(first), await partner.calculate_score(other)
    assert set(partner._instance_dict) == {first, other}
    await partner.finalize_interaction(first)
    with pytest.raises(KeyError):  # as in verl
        await partner.finalize_interaction(first)
    assert (answers, score) == ([WRONG, WRONG, RIGHT, WRONG, RIGHT], (1.0, 0.0))
    assert set(partner._instance_dict) == {"fixed"}
    with pytest.raises(ValueError, match="interaction_kwargs.ground_truth"):
        await partner.start_interaction()


class EchoInteraction(BaseInteraction):
    pass


def test_a_file_of_interactions_by_name(tmp_path):
    file = tmp_path / "interactions.yaml"
    file.write_text(
        "interaction:\n"
        "  - {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {a: 1}}\n"
        f"  - {{class_name: {__name__}.EchoInteraction, name: parrot}}\n"
    )
    interactions = initialize_interactions_from_config(str(file))
    assert {name: (type(i), i.name, i.config) for name, i in interactions.items()} == {
        "gsm8k": (Gsm8kInteraction, "gsm8k", {"a": 1, "name": "gsm8k"}),
        "parrot": (get_interaction_class(f"{__name__}.EchoInteraction"), "parrot", {"name": "parrot"}),
    }


@pytest.mark.parametrize(
    "entries, message",
    [
        ([{"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}] * 2,
         r"interaction\[1\] .*the name 'gsm8k' is taken"),
        ([{"class_name": "builtins.dict"}], r"interaction\[0\] \(builtins.dict\): .*no subclass of"),
    ],
)  # fmt: skip
def test_a_broken_file_ends_in_one_message(tmp_path, entries, message):
    file = tmp_path / "broken.yaml"
    file.write_text(f"interaction: {entries}")
    with pytest.raises(ValueError, match=message) as raised:
        initialize_interactions_from_config(str(file))
    assert str(raised.value).startswith(str(file))
