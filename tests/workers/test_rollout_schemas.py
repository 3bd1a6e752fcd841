"""AsyncRolloutRequest: messages in, tensors out, token for token by hand."""

import pytest
import torch
from loguru import logger
from pydantic import ValidationError

from tests.helpers.models import make_tokenizer
from verl.workers.rollout.schemas import (
    AsyncRolloutRequest,
    AsyncRolloutRequestStateEnum,
    FinishReasonTypeEnum,
    TokenizationSanityCheckModeEnum,
)
from verl.workers.rollout.tools.schemas import OpenAIFunctionToolCall, ToolResponse

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} "
    "{% for c in m.tool_calls or [] %}call {{ c.function.name }} {% endfor %}</s> | {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
WORDS = ["<s>", "</s>", "|", "call", "calculator", "user", "assistant", "tool", "system"]
WORDS += "You are a helpful assistant. Hello. one two three".split()


@pytest.fixture
def tokenizer():
    made = make_tokenizer(WORDS)
    made.chat_template = TEMPLATE
    made.eos_token = "</s>"
    made.add_special_tokens({"additional_special_tokens": ["|"]})  # text after the end of a turn would be refused
    return made


def request(tokenizer, mode="strict", use_inference_chat_template=False, **settings):
    return AsyncRolloutRequest(
        request_id="r", state=AsyncRolloutRequestStateEnum.PENDING, messages=[{"role": "user", "content": "one"}],
        reward_scores={}, max_prompt_len=16, tokenization_sanity_check_mode=mode,
        use_inference_chat_template=use_inference_chat_template,
        processing_class=tokenizer, response_ids=None, **settings,
    )  # fmt: skip


def words(tokenizer, ids):
    return " ".join(tokenizer.convert_ids_to_tokens(ids.reshape(-1).tolist()))


def warnings(function):
    lines = []
    handler = logger.add(lambda line: lines.append(str(line)), level="WARNING")
    try:
        function()
    finally:
        logger.remove(handler)
    return lines


def conversation(tokenizer, **settings):
    """user: one, assistant calls, the tool says two, assistant generates "three </s>" with log-probs."""
    made = request(tokenizer, **settings)
    call = OpenAIFunctionToolCall(id="0", function={"name": "calculator", "arguments": {}})
    ids = tokenizer.convert_tokens_to_ids("three call calculator </s>".split())
    made.add_assistant_message(tokenizer, "three", torch.tensor([ids]), [call], [-1.0, -2.0, -3.0, -4.0])
    made.add_tool_response_messages(tokenizer, [ToolResponse(text="two")])
    assert made.get_generation_prompt_ids(tokenizer) == made.get_generation_prompt_ids(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["three", "</s>"])
    made.add_assistant_message(tokenizer, "three", ids, log_probs=[-5.0, -6.0])
    return made


def test_a_conversation_with_a_tool(tokenizer):
    made = conversation(tokenizer)
    assert words(tokenizer, made.prompt_ids) == "<s> user one </s> | <s> assistant"
    response = "three call calculator </s> | <s> tool two </s> | <s> assistant three </s>"
    assert words(tokenizer, made.response_ids) == response
    assert words(tokenizer, made.input_ids) == "<s> user one </s> | <s> assistant " + response
    mask = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert made.response_loss_mask.tolist() == [mask]
    assert made.loss_mask.tolist() == [[0] * 7 + mask]
    assert made.rollout_log_probs.tolist() == [[-1, -2, -3, -4, 0, 0, 0, 0, 0, 0, 0, 0, -5, -6]]
    assert words(tokenizer, made.output_token_ids) == "three call calculator </s> three </s>"
    assert made.attention_mask.tolist() == [[1] * 21]
    assert made.position_ids.tolist() == [list(range(21))]
    assert made.prompt_position_ids.tolist() == [list(range(7))]
    assert made.response_position_ids.tolist() == [list(range(7, 21))]
    assert words(tokenizer, made.generation_prompt_ids) == "<s> assistant"
    # <s> system You are a helpful assistant. </s> | and <s> user Hello. </s> |
    assert made.base_conv_wo_gen_prompt_end_pos == 9 + 5
    assert made.base_conv_with_gen_prompt_end_pos == 9 + 5 + 2


def test_generation_may_continue_the_messages_encoded_at_once(tokenizer):
    for at_once, first in ((False, "three"), (True, "two")):
        made = request(tokenizer, use_inference_chat_template=at_once)
        made.add_assistant_message(tokenizer, "two", tokenizer.convert_tokens_to_ids(["three", "</s>"]))
        made.add_user_message(tokenizer, "one")
        asked = words(tokenizer, torch.tensor(made.get_generation_prompt_ids(tokenizer)))
        assert asked == f"<s> user one </s> | <s> assistant {first} </s> | <s> user one </s> | <s> assistant"


def test_finalize_accepts_a_faithful_conversation_and_cuts_it(tokenizer):
    made = conversation(tokenizer, max_response_len=6)
    assert warnings(lambda: made.finalize(tokenizer, {"calculator": [1.0]})) == []
    assert made.state == AsyncRolloutRequestStateEnum.COMPLETED and made.reward_scores == {"calculator": [1.0]}
    assert words(tokenizer, made.response_ids) == "three call calculator </s> | <s>"
    assert made.response_loss_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert made.rollout_log_probs.tolist() == [[-1, -2, -3, -4, 0, 0]]
    made = conversation(tokenizer, max_model_len=9)
    made.finalize(tokenizer, {})
    assert words(tokenizer, made.input_ids) == "<s> user one </s> | <s> assistant three call"


@pytest.mark.parametrize("mode, warned", [("strict", True), ("ignore_strippable", True), ("disable", False)])
def test_finalize_reports_ids_that_are_not_those_of_the_messages(tokenizer, mode, warned):
    made = request(tokenizer, mode)
    made.add_assistant_message(tokenizer, "two", tokenizer.convert_tokens_to_ids(["three", "</s>"]))
    lines = warnings(lambda: made.finalize(tokenizer, {}))
    assert bool(lines) == warned
    if warned:
        assert "from position 7" in lines[0] and "'three </s>' against 'two </s>'" in lines[0]
    assert words(tokenizer, made.response_ids) == "three </s>"


def test_a_turn_that_was_cut_is_no_difference(tokenizer):
    made = request(tokenizer)
    made.add_assistant_message(tokenizer, "two three", tokenizer.convert_tokens_to_ids(["two"]))
    assert warnings(lambda: made.finalize(tokenizer, {}, FinishReasonTypeEnum.LENGTH)) == []


def test_without_ids_the_template_encodes_a_turn_of_the_model(tokenizer):
    made = request(tokenizer, TokenizationSanityCheckModeEnum.STRICT)
    made.add_assistant_message(tokenizer, "two")
    made.add_user_message(tokenizer, "three")
    text = "<s> user one </s> | <s> assistant two </s> | <s> user three </s> |"
    assert words(tokenizer, made.input_ids) == text
    assert made.response_loss_mask.tolist() == [[1, 1] + [0] * 6]
    assert warnings(lambda: made.finalize(tokenizer, {})) == []
    assert [message.role for message in made.messages] == ["user", "assistant", "user"]


def test_metrics_of_a_tool_are_listed(tokenizer):
    made = request(tokenizer)
    made.update_metrics({"seconds": 1}, "calculator")
    made.update_metrics({"seconds": 2}, "calculator")
    assert made.metrics == {"calculator": [{"seconds": 1}, {"seconds": 2}]}
    assert request(tokenizer).metrics == {}


def test_what_is_refused(tokenizer):
    made = request(tokenizer)
    with pytest.raises(ValueError, match="role 'user' follows only a turn of the model"):
        made.add_user_message(tokenizer, "two")
    made.add_assistant_message(tokenizer, "two")
    with pytest.raises(ValueError, match="images or videos"):
        made.add_tool_response_messages(tokenizer, [ToolResponse(image=[1])])
    with pytest.raises(ValidationError, match="multi_modal_"):
        request(tokenizer, multi_modal_keys=["image"])
    with pytest.raises(ValueError, match="'eos' is not a valid FinishReasonTypeEnum"):
        FinishReasonTypeEnum.from_str("eos")
    assert warnings(lambda: request(tokenizer, max_response_len=1)) == []
