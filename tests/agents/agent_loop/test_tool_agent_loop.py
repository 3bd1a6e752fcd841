"""Conversations of a model that writes by its last token, against a real vLLM server: every token by hand."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tests.agents.agent_loop.parts import EVENTS, listed, prompts_of, server_group
from tests.helpers.columns import object_columns
from tests.helpers.configs import compose_ppo
from tests.helpers.engines import make_engine, serve_weights
from tests.helpers.models import save_markov_llama
from tests.helpers.rl_run import overrides
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.agents.agent_loop.worker import get_trajectory_info
from verl.reward.rows import LOST
from verl.trainer.ppo.turn_rows import to_rows
from verl.utils.tokenizer import hf_tokenizer

pytestmark = pytest.mark.process  # vLLM asks the system's tools about the machine when it starts

CALL = '<tool_call> {"name": "add", "arguments": {"a": 2, "b": 5}} </tool_call>'.split()
WORDS = [*CALL, "<tool_call>{", "add", "break", "again", "?", "user", "tool", "Hello.", "Yes.", "7", "so", "what", "1",
         "2", "You", "are", "a", "helpful", "assistant.", "Error:"]  # fmt: skip
# Each message is its role's word and its text; nothing is added where the model continues.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }} <eos>{% else %}"
    "{% if m['role'] != 'system' %} {{ m['role'] }} {% endif %}{{ m['content'] }} {% endif %}{% endfor %}"
)
PARTS = "tests.agents.agent_loop.parts"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    after = dict(zip(["add", *CALL], [*CALL, "<eos>"], strict=True))
    after |= {"break": "<tool_call>{", "7": "so", "so": "<eos>", "?": "what", "what": "<eos>"}
    return save_markov_llama(tmp_path_factory.mktemp("markov"), WORDS, after, TEMPLATE)


@pytest.fixture(scope="module")
def served(model):
    engine = make_engine(model)
    rollout = serve_weights(engine, version=4, prompt_length=8, response_length=40)
    yield SimpleNamespace(rollout=rollout, engine=engine)
    rollout.close()


@pytest.fixture
def converse(served, model, tmp_path):
    """A function that holds conversations: (rows, settings of multi_turn) -> DataProto."""
    EVENTS.clear()
    managers = []

    def converse(rows, interaction=False, n=1, **multi_turn):
        multi_turn = {"tool_config_path": listed(tmp_path, "tools", "AddTool")} | multi_turn
        if interaction:
            multi_turn["interaction_config_path"] = listed(tmp_path, "interaction", "PatientInteraction")
        config = compose_ppo(
            *overrides(
                tmp_path / "run", model, data__max_prompt_length=8, data__max_response_length=40,
                actor_rollout_ref__rollout__name="vllm", actor_rollout_ref__rollout__mode="async",
                actor_rollout_ref__rollout__calculate_log_probs="true", actor_rollout_ref__model__external_lib=PARTS,
                trainer__local="true",
            )
        )  # fmt: skip
        OmegaConf.update(config, "actor_rollout_ref.rollout.multi_turn", multi_turn)
        managers.append(AgentLoopManager(config, server_group(served.rollout.server_handle)))
        columns = object_columns(
            raw_prompt=[[{"role": "user", "content": row.get("text", "add")}] for row in rows],
            agent_name=[row.get("agent", "tool_agent") for row in rows],
            tools_kwargs=[row.get("tools", {}) for row in rows],
            interaction_kwargs=[row.get("interaction", {}) for row in rows],
        )
        return managers[-1].generate_sequences(prompts_of(columns, width=8, n=n))

    yield converse
    for manager in managers:
        manager.close()


def shown(model, output, row=0):
    """(words of the prompt, words of the response with 1 or 0 for generated or given)."""
    tokenizer, batch = hf_tokenizer(model), output.batch
    length = batch["responses"].shape[1]
    mask = batch["attention_mask"][row].bool()
    prompt = tokenizer.convert_ids_to_tokens(batch["prompts"][row][mask[:-length]])
    words = tokenizer.convert_ids_to_tokens(batch["responses"][row][mask[-length:]])
    return prompt, list(zip(words, batch["response_mask"][row].tolist(), strict=False))


def marked(*turns):
    """[(word, 1 or 0)] of turns (mask, words)."""
    return [(word, mask) for mask, words in turns for word in words]


def test_a_call_is_answered_and_the_conversation_continues(converse, model):
    output = converse([{}])
    columns = output.non_tensor_batch
    prompt, words = shown(model, output)
    assert prompt == ["user", "add"]
    assert words == marked((1, [*CALL, "<eos>"]), (0, ["tool", "7"]), (1, ["so", "<eos>"]))
    assert columns["__num_turns__"].tolist() == [4] and columns["end_reason"].tolist() == ["stop"]
    assert columns["tool_rewards"].tolist() == [[0.25]] and columns["reward_scores"].tolist() == [{"add": 1.0}]
    assert columns["tool_call_counts"].tolist() == [1] and columns["failed_tool_calls"].tolist() == [0]
    assert columns["weights_version"].tolist() == [4]
    assert [event[0] for event in EVENTS] == ["create", "execute", "release"]


def generated_tokens(served, batch):
    """The mask of the generated tokens, whose log-probs must be those of the trained module."""
    with torch.no_grad(), served.engine.eval_mode():
        logits = served.engine.module(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits.float()
    length, mask = batch["responses"].shape[1], batch["response_mask"].bool()
    expected = logits.log_softmax(-1)[:, -length - 1 : -1].gather(2, batch["responses"][..., None])[..., 0]
    assert torch.allclose(batch["rollout_log_probs"][mask], expected[mask], atol=1e-3)
    return mask


def test_log_probs_are_those_of_the_trained_module_at_every_generated_token(converse, served):
    batch = converse([{}, {"text": "?"}], n=2).batch
    mask = generated_tokens(served, batch)
    assert mask.sum() == 2 * (10 + 2) + 2 * 2 and (batch["rollout_log_probs"][~mask] == 0).all()


def test_log_probs_of_turns_are_those_of_the_module_after_their_own_prompts(converse, served, model):
    """The template leaves calls out of the second turn's prompt, which the row of the conversation does not."""
    batch = to_rows(converse([{}, {"text": "?"}], n=2, row_per_turn=True)).batch
    assert generated_tokens(served, batch).sum(1).tolist() == [10, 2, 10, 2, 2, 0, 2, 0]
    second = batch["input_ids"][1][batch["attention_mask"][1].bool()].tolist()
    assert hf_tokenizer(model).decode(second).split() == ["user", "add", "<eos>", "tool", "7", "so", "<eos>"]


def test_rows_come_back_in_order_with_the_samples_of_a_prompt_adjacent(converse, model):
    output = converse([{"text": "?"}, {}, {"agent": "silent"}, {"text": "?", "agent": "single_turn_agent"}], n=2)
    texts = [[word for word, _ in shown(model, output, row)[1]] for row in range(8)]
    assert texts[0] == texts[1] == texts[6] == texts[7] == ["what", "<eos>"]
    assert texts[2] == texts[3] and texts[2][0] == "<tool_call>" and texts[4] == texts[5] == []
    assert output.non_tensor_batch["__num_turns__"].tolist() == [2, 2, 4, 4, 1, 1, 2, 2]
    assert not output.non_tensor_batch[LOST].any()


def test_an_interaction_answers_until_it_ends_the_conversation(converse, model):
    output = converse([{"text": "?", "interaction": {"turns": 2}}, {"text": "?", "interaction": {"turns": 1}}], True)
    columns = output.non_tensor_batch
    answer = (1, ["what", "<eos>"])
    assert shown(model, output)[1] == marked(answer, (0, ["user", "again", "?"]), answer)
    assert shown(model, output, 1)[1] == marked((1, ["what", "<eos>"]))  # no text after its end
    assert columns["turn_scores"].tolist() == [[0.5, 0.5], [0.5]] and columns["asked"].tolist() == [2, 1]
    assert columns["__num_turns__"].tolist() == [4, 2]
    finalized = [event[1] for event in EVENTS if event[0] == "finalized"]
    assert len(finalized) == 2 == len(set(finalized))


def test_an_unknown_loop_is_named(converse):
    with pytest.raises(ValueError, match="agent_name='nobody' is unknown. Known: .*silent.*tool_agent"):
        converse([{"agent": "nobody"}])


def test_trajectory_info_numbers_equal_neighbours():
    infos = asyncio.run(get_trajectory_info(3, [7, 7, 8, 7], True))
    assert [(i["sample_index"], i["rollout_n"]) for i in infos] == [(7, 0), (7, 1), (8, 0), (7, 0)]
    assert all(i["step"] == 3 and i["validate"] for i in infos)
