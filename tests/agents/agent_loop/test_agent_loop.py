"""Workers and their manager on a scripted engine: rows, columns, settings, conversations that break off."""

import asyncio
import json
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import torch
from omegaconf import OmegaConf

import verl
from tests.agents.agent_loop.parts import EVENTS, listed, prompts_of, server_group
from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.agents.agent_loop.test_tool_agent_loop import TEMPLATE, WORDS
from tests.helpers.columns import object_columns
from tests.helpers.configs import SOUND, compose_ppo
from tests.helpers.logs import logged
from tests.helpers.models import make_tokenizer
from tests.reward.test_managers import TOKENIZER
from verl.agents.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, AsyncLLMServerManager, register
from verl.agents.agent_loop.manager import manager_class
from verl.agents.agent_loop.registry import _agent_loop_registry, make_agent_loop, resolve_config_path
from verl.agents.agent_loop.rows import batch_of
from verl.agents.agent_loop.server_manager import ConversationTooLong
from verl.agents.agent_loop.tool_agent_loop import HANDLERS, TRANSITIONS, AgentState, ToolAgentLoop
from verl.agents.agent_loop.worker import AgentLoopWorkerBase
from verl.agents.rollout_trace import RolloutTraceConfig
from verl.config.rollout import RolloutConfig
from verl.reward.managers import NaiveRewardManager
from verl.reward.rows import LOST, place_scores
from verl.rollout.replica import ServerClient, ServerHandle, TokenOutput
from verl.trainer.ppo.rollout_phase import RolloutPhase
from verl.utils.http_json import ServerUnreachable

EOS, PROMPT, RESPONSE = 2, 8, 20


@register("changing")
class ChangingLoop(AgentLoopBase):
    """Takes entries out of its settings, as upstream's servers do, and returns columns of its own."""

    async def run(self, sampling_params, extra=None, score=None, **kwargs):
        row = kwargs["trajectory"]["sample_index"]
        params = {name: sampling_params.pop(name) for name in list(sampling_params)}
        asked = {**params, "max_tokens": 9}
        output = await self.server_manager.generate(f"{row}", prompt_ids=[5], sampling_params=asked)
        experts = torch.full((1 + len(output.token_ids) + 30, 2, 1), row) if extra == "experts" else None
        return AgentLoopOutput(
            prompt_ids=[5], response_ids=output.token_ids, response_mask=[1] * len(output.token_ids), num_turns=2,
            routed_experts=experts, reward_score=score,
            extra_fields={} if extra is None else {extra: row, "params": params},
        )  # fmt: skip


@pytest.fixture
def manager(tmp_path):
    """A function that makes a manager in this process, whose engine answers `answer(row, turn)`."""
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(WORDS)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    made = []

    def make(answer, interaction=False, **rollout):
        config = compose_ppo(*SOUND, f"actor_rollout_ref.model.path={folder}", "trainer.local=true",
                             f"trainer.default_local_dir={tmp_path / 'run'}")  # fmt: skip
        path = listed(tmp_path, "interaction", "PatientInteraction") if interaction else None
        base = {"name": "vllm", "mode": "async", "prompt_length": PROMPT, "response_length": RESPONSE,
                "multi_turn": {"interaction_config_path": path, "tool_timeout": 0.3}}  # fmt: skip
        OmegaConf.update(config, "actor_rollout_ref.rollout", base)
        OmegaConf.update(config, "actor_rollout_ref.rollout", rollout, merge=True)
        manager = AgentLoopManager(config, server_group())
        (worker,) = manager.agent_loop_workers
        turns = {}

        def scripted(request_id, prompt_ids, sampling_params):
            turns[request_id] = turns.get(request_id, 0) + 1
            return answer(int(request_id) if request_id.isdigit() else prompt_ids, turns[request_id])

        worker.server_manager = ScriptedEngine(worker.rollout_config, scripted)
        made.append(manager)
        return manager

    yield make
    for one in made:
        one.close()


FILTERS = {"top_k": 5, "top_p": 0.9}


@pytest.mark.parametrize(("agent", "rollout", "meta", "warns"), [
    ("changing", FILTERS, {}, True), ("single_turn_agent", FILTERS, {}, True), ("changing", {}, {}, False),
    ("changing", FILTERS, {"validate": True}, False),
    ("changing", FILTERS | {"record_sampling_mask": False}, {}, False),
])  # fmt: skip
def test_a_loop_that_drops_the_kept_tokens_is_a_warning(manager, agent, rollout, meta, warns):
    made = manager(lambda row, turn: [7, EOS], **rollout)
    with logged() as lines:
        generated(made, 3, agent, meta=meta)
    assert [f"agent loop {agent} returns no AgentLoopOutput.kept_tokens" in line for line in lines] == [True] * warns


def prompts(size, agent="changing", meta=(), **columns):
    asked = [[{"role": "user", "content": "what"}]] * size
    objects = {"raw_prompt": asked, "agent_name": [agent] * size, "sample_index": range(size), **columns}
    return prompts_of(object_columns(**objects), PROMPT, **dict(meta))


def generated(manager, size, agent="changing", on_finished=None, meta=(), **columns):
    return manager.generate_sequences(prompts(size, agent, meta, **columns), on_finished)


def test_settings_are_each_conversations_own_and_columns_may_differ(manager):
    output = generated(manager(lambda row, turn: [7, EOS]), 3, extra=["here", None, "there"])
    columns = output.non_tensor_batch
    assert columns["here"].tolist() == [0, None, None] and columns["there"].tolist() == [None, None, 2]
    first, none, third = columns["params"]
    assert none is None and first["temperature"] == third["temperature"] == 1.0 and first["seed"] != third["seed"]


def test_a_score_that_is_not_finite_is_named_with_its_row(manager):
    with pytest.raises(ValueError, match=r"reward_score=nan \(row 1\) must be finite"):
        generated(manager(lambda row, turn: [7, EOS]), 3, score=[1.0, float("nan"), 2.0])


def test_experts_of_a_loop_that_was_written_for_verl_are_accepted(manager):
    output = generated(manager(lambda row, turn: [7] * 5), 2, extra=["experts", None])
    assert "routed_experts" not in output.batch and output.non_tensor_batch["experts"].tolist() == [0, None]


def test_a_single_turn_has_the_tools_in_its_prompt(manager, tmp_path):
    made = manager(lambda row, turn: [7, EOS])
    (worker,) = made.agent_loop_workers
    worker.tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    made.config.data.tool_config_path = listed(tmp_path, "tools", "AddTool")
    given = [None, [9, 8]]  # the data set's prompts have them already
    output = generated(made, 2, agent="single_turn_agent", raw_prompt_ids=given)
    assert worker.tokenizer.convert_ids_to_tokens(output.batch["prompts"][0])[-3:] == ["add", "user", "what"]
    assert output.batch["prompts"][1, -2:].tolist() == [9, 8]


def test_a_prompt_that_is_too_long_costs_its_own_row_only(manager):
    prompts = [[{"role": "user", "content": "what " * length}] for length in (PROMPT - 1, PROMPT)]
    made = manager(lambda row, turn: [7, EOS])
    output = generated(made, 2, agent="tool_agent", raw_prompt=prompts)
    assert output.non_tensor_batch[LOST].tolist() == [False, True]
    assert output.batch["responses"][0, :2].tolist() == [7, EOS]
    (worker,) = made.agent_loop_workers
    assert [len(ids) for ids in worker.server_manager.seen] == [PROMPT]  # nothing was asked about the other


@pytest.mark.parametrize(("settings", "limit"), [({}, PROMPT + RESPONSE), ({"max_model_len": 12}, 12)])
def test_a_conversation_that_fills_the_model_is_lost_before_a_server_is_asked(manager, settings, limit):
    config = manager(lambda row, turn: [7, EOS], **settings).config
    servers, asked = AsyncLLMServerManager(config, [ServerHandle("127.0.0.1:1")]), []

    async def answer(rid, ids, sampling, log_probs):
        asked.append(sampling["max_tokens"])
        return TokenOutput(token_ids=[7])

    servers.clients[0].generate = answer
    asyncio.run(servers.generate("a", prompt_ids=[5] * (limit - 1), sampling_params={"max_tokens": 9}))
    with pytest.raises(ConversationTooLong, match=f"its {limit} tokens leave no room .* is {limit}: raise it"):
        asyncio.run(servers.generate("a", prompt_ids=[5] * limit, sampling_params={"max_tokens": 9}))
    assert asked == [1]


@pytest.mark.parametrize("agent", ["single_turn_agent", "tool_agent"])
def test_an_answer_is_cut_where_the_engine_says_so_whatever_its_length(manager, agent):
    """A stop token at the limit; an answer that another limit cut; one that ended."""
    whole, short = [7] * (RESPONSE - 1) + [EOS], [7] * 5
    for ids, reason in [(whole, "completed"), (short, "length"), ([7, EOS], "completed")]:
        made = manager(lambda row, turn, ids=ids, reason=reason: TokenOutput(token_ids=ids, stop_reason=reason))
        more = {"tools_kwargs": [{}]} if agent == "tool_agent" else {}
        output = generated(made, 1, agent=agent, **more)
        assert output.non_tensor_batch["end_reason"].tolist() == ["length" if reason == "length" else "stop"]


def test_a_row_that_a_loop_makes_longer_than_the_response_counts_as_cut():
    rollout = RolloutConfig(name="vllm", prompt_length=2, response_length=3)
    outputs = [AgentLoopOutput(prompt_ids=[5], response_ids=[6] * n, response_mask=[1] * n) for n in (3, 4)]
    assert batch_of(outputs, rollout, 0).non_tensor_batch["end_reason"].tolist() == [None, "length"]
    assert "end_reason" not in batch_of(outputs[:1], rollout, 0).non_tensor_batch


def test_a_stop_token_at_the_limit_ends_an_answer_also_where_the_engine_looks_at_the_limit_first():
    client = ServerClient.__new__(ServerClient)
    client.handle = ServerHandle("127.0.0.1:1")

    async def post(path, body, timeout=None):
        return {"output_ids": [7, EOS], "meta_info": {"finish_reason": {"type": "length"}}}

    client.post = post
    for sampling, reason in (({"stop_token_ids": [EOS]}, "completed"), ({"stop_token_ids": [7]}, "length"),
                             ({"stop_token_ids": [EOS], "ignore_eos": True}, "length"), ({}, "length")):  # fmt: skip
        assert asyncio.run(client.generate("a", [5], sampling, False)).stop_reason == reason


def test_an_empty_answer_is_a_row_and_its_score_has_a_place(manager):
    output = generated(manager(lambda row, turn: [] if row else [7, EOS]), 2)
    assert output.batch["response_mask"].sum(1).tolist() == [2, 0] and not output.non_tensor_batch[LOST].any()
    assert place_scores(output, [0.5, 0.25]).sum(1).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("own", "lost", "graded", "expected"),
    [([0.5, 0.25, -1.0], [], 0, [0.5, 0.25, -1.0]), ([0.5, None, -1.0], [1], 0, [0.5, 0, -1.0]),
     ([0.5, None, -1.0], [], 3, [2, 2, 2])],
)  # fmt: skip
def test_scores_of_loops_take_the_place_of_the_reward_function(manager, own, lost, graded, expected):
    def answer(row, turn):
        if row in lost:
            raise ServerUnreachable("gone")
        return [7, EOS]

    calls = []

    def count(data_source, solution_str, **rest):
        calls.append(data_source)
        return 2.0

    made = manager(answer)
    phase = RolloutPhase.__new__(RolloutPhase)
    phase.rollout_config, phase.tokenizer, phase.agent_loops = made.rollout_config, TOKENIZER, made
    phase.rm_group, phase.streams_rewards = None, True
    reward = NaiveRewardManager(TOKENIZER, 0, count)
    truth = {"reward_model": [{"ground_truth": "7"}] * 3, "data_source": ["here"] * 3}
    samples, _ = phase.generate(prompts(3, score=own, **truth), step=1, reward_fn=reward, n=1, eos_token_id=EOS)
    scores = phase.score(samples, reward)[1]
    assert scores[:, 1].tolist() == expected and scores.sum(1).tolist() == expected and len(calls) == graded


def test_the_slowest_are_cancelled_once_the_others_have_ended(manager):
    cancelled = []

    async def answer(row):
        try:
            await asyncio.sleep(60 if row in (1, 4) else 0.01)
        except asyncio.CancelledError:
            cancelled.append(row)
            raise
        return [7, EOS]

    finished = []
    made = manager(lambda row, turn: answer(row), over_sample_rate=0.25)
    output = generated(made, 8, on_finished=lambda i, row: finished.append(i))
    assert output.non_tensor_batch[LOST].nonzero()[0].tolist() == [1, 4] == sorted(cancelled)
    assert sorted(finished) == [0, 2, 3, 5, 6, 7] and len(output) == 8
    assert output.meta_info["metrics"]["agent_loop/end/cancelled"] == 0.25


def test_conversations_may_be_cancelled_before_they_have_begun(manager):
    (worker,) = manager(lambda row, turn: asyncio.sleep(60)).agent_loop_workers
    batch = prompts(3)
    batch.meta_info["sampling"] = {}

    async def cancel_at_once():
        call = asyncio.create_task(worker.generate_sequences(batch))
        await asyncio.create_task(worker.cancel_rest())
        return await call

    assert asyncio.run(cancel_at_once()).non_tensor_batch[LOST].tolist() == [True] * 3


@pytest.mark.parametrize("meta", [{"validate": True}, {"do_sample": False}])
def test_validations_and_greedy_baselines_are_complete(manager, meta):
    async def answer(row):
        await asyncio.sleep(0.3 if row == 1 else 0)
        return [7, EOS]

    output = generated(manager(lambda row, turn: answer(row), over_sample_rate=0.5), 4, meta=meta)
    assert not output.non_tensor_batch[LOST].any()


def test_over_sampling_needs_our_workers(manager):
    class Own(AgentLoopWorkerBase):
        async def generate_sequences(self, batch):
            return await super().generate_sequences(batch)

    class OwnManager(AgentLoopManager):
        agent_loop_workers_class = Own

    config = manager(lambda row, turn: [7], over_sample_rate=0.5).config
    with pytest.raises(ValueError, match="over_sample_rate=0.5 needs agent loop workers whose generate_sequences"):
        OwnManager(config, server_group())


@pytest.mark.parametrize("agent", ["single_turn_agent", "tool_agent"])
def test_an_aborted_generation_is_lost(manager, agent):
    made = manager(lambda row, turn: TokenOutput(token_ids=[7], stop_reason="aborted"))
    output = generated(made, 2, agent=agent)
    assert output.non_tensor_batch[LOST].all()
    assert output.meta_info["metrics"]["agent_loop/end/cancelled"] == 1


@pytest.mark.parametrize("fault", [{"raises": True}, {"hangs": True}, {"start": "raises"}, {"start": "hangs"},
                                   {"extra": 5}])  # fmt: skip
def test_a_conversation_whose_interaction_fails_is_lost_and_the_others_are_not(manager, fault):
    EVENTS.clear()
    made = manager(lambda row, turn: [7, EOS], interaction=True)
    kwargs = [{"turns": 2}, {"turns": 2, **fault}]
    output = generated(made, 2, agent="tool_agent", interaction_kwargs=kwargs, tools_kwargs=[{}, {}])
    assert output.non_tensor_batch[LOST].tolist() == [False, True]
    assert output.non_tensor_batch["end_reason"].tolist() == ["stop", "tool_failed"]
    instances = [[instance for kind, instance, *_ in EVENTS if kind == event] for event in ("started", "finalized")]
    ids = {id if i and "start" in fault else f"{id}_started" for i, id in enumerate(instances[0])}
    assert len(ids) == 2 and set(instances[1]) == ids  # however they ended


def test_values_of_an_interaction_do_not_replace_those_of_the_loop(manager):
    made = manager(lambda row, turn: [7, EOS], interaction=True)
    kwargs = [{"turns": 1, "extra": {"end_reason": "cancelled", "weights_versions": [1, 2], "mood": 3}}]
    output = generated(made, 1, agent="tool_agent", interaction_kwargs=kwargs, tools_kwargs=[{}])
    columns = output.non_tensor_batch
    assert columns["end_reason"].tolist() == ["stop"] and columns["weights_version"].tolist() == [3]
    assert columns["mood"].tolist() == [3] and not columns[LOST].any()


@pytest.mark.parametrize("state", HANDLERS)
def test_a_state_that_may_not_follow_is_refused(manager, state, monkeypatch):
    assert set(TRANSITIONS) == set(HANDLERS) == set(AgentState) - {AgentState.TERMINATED}
    assert all(AgentState.TERMINATED in after for after in TRANSITIONS.values())
    ways = {AgentState.PENDING: AgentState.GENERATING, AgentState.GENERATING: state, state: AgentState.PENDING}
    for start, end in ways.items():
        monkeypatch.setattr(ToolAgentLoop, HANDLERS[start], AsyncMock(return_value=end))
    with pytest.raises(RuntimeError, match=f"{HANDLERS[state]} returned AgentState.PENDING; after {state} it may be: "):
        generated(manager(lambda row, turn: [7, EOS]), 1, agent="tool_agent", tools_kwargs=[{}])


def calling(manager, tmp_path, turns, tool="AddTool", **multi_turn):
    """The row of a conversation whose model writes `turns`, each a number of calls of the tool, then "so"."""
    EVENTS.clear()
    call = '<tool_call> {"name": "add", "arguments": {"a": 2, "b": 5}} </tool_call>'.split()
    words = [[*call * number, "<eos>"] for number in turns] + [["so", "<eos>"]]
    made = manager(lambda row, turn: ids(words[turn - 1]), response_length=100,
                   multi_turn={"tool_config_path": listed(tmp_path, "tools", tool), **multi_turn})  # fmt: skip
    tokenizer = made.agent_loop_workers[0].tokenizer
    ids = tokenizer.convert_tokens_to_ids
    output = generated(made, 1, agent="tool_agent", tools_kwargs=[{}])
    given = output.batch["attention_mask"][0, PROMPT:].bool() & ~output.batch["response_mask"][0].bool()
    columns = {name: column[0] for name, column in output.non_tensor_batch.items()}
    return columns, tokenizer.convert_ids_to_tokens(output.batch["responses"][0][given])


@pytest.mark.parametrize(("limit", "answers"), [({"max_user_turns": 1}, 1), ({"max_assistant_turns": 1}, 0)])
def test_turns_limit_a_conversation(manager, tmp_path, limit, answers):
    columns, given = calling(manager, tmp_path, [1, 1], **limit)
    assert columns["end_reason"] == "turns" and columns["__num_turns__"] == 2 + 2 * answers
    assert given == ["tool", "7"] * answers and [kind for kind, *_ in EVENTS].count("execute") == answers


@pytest.mark.parametrize(("limit", "made"), [(1, 1), (2, 2), (3, 3)])
def test_calls_beyond_those_of_one_turn_are_answered_and_not_made(manager, tmp_path, limit, made):
    columns, given = calling(manager, tmp_path, [3], max_parallel_calls=limit)
    assert given.count("tool") == 3 and given.count("7") == made and given.count("Error:") == 3 - made
    assert [kind for kind, *_ in EVENTS].count("execute") == made == columns["tool_call_counts"]
    assert columns["end_reason"] == "stop"


class Greeting(AgentLoopBase):
    """Answers with its setting."""

    def __init__(self, *args, word, **kwargs):
        super().__init__(*args, **kwargs)
        self.word = word

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=[5], response_ids=[self.word], response_mask=[1])


class OwnManager(AgentLoopManager):
    pass


def test_loops_of_a_file_get_its_settings(manager, tmp_path):
    entries = [{"name": f"greets_{word}", "_target_": f"{__name__}.Greeting", "word": word} for word in (7, 9)]
    (tmp_path / "loops.yaml").write_text(json.dumps(entries))
    made = manager(lambda row, turn: [7, EOS], agent={"agent_loop_config_path": str(tmp_path / "loops.yaml")})
    try:
        output = generated(made, 2, agent_name=["greets_9", "greets_7"])
    finally:
        for entry in entries:
            del _agent_loop_registry[entry["name"]]
    assert output.batch["responses"][:, 0].tolist() == [9, 7]


def test_the_manager_is_the_one_that_is_named(manager):
    config = manager(lambda row, turn: [7, EOS]).config
    assert manager_class(config) is AgentLoopManager
    config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = f"{__name__}.OwnManager"
    assert manager_class(config) is OwnManager


def test_paths_of_loops_files(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    for name in ("out.yaml", "work/in.yaml"):
        (tmp_path / name).write_text("[]")
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_config_path("in.yaml") == str(tmp_path / "work" / "in.yaml")
    packaged = "trainer/config/rollout/rollout.yaml"
    assert resolve_config_path(packaged) == str(Path(verl.__file__).parent / packaged)
    with pytest.raises(ValueError, match=r"'../out.yaml' leaves .*work; give an absolute path"):
        resolve_config_path("../out.yaml")
    with pytest.raises(FileNotFoundError, match="'out.yaml' is no file in .*work, "):
        resolve_config_path("out.yaml")


def test_pictures_of_a_tool_are_refused(manager, tmp_path):
    columns, given = calling(manager, tmp_path, [1], tool="PictureTool")
    assert given[:2] == ["tool", "Error:"] and "7" not in given and columns["tool_rewards"] == []


@pytest.mark.parametrize(
    ("ids", "settings", "tokens"),
    [
        ([7, EOS], {"max_model_len": 7}, 2),  # the interaction's three tokens would fill the model
        ([7] * (RESPONSE - 4) + [EOS], {}, RESPONSE - 3),
        ([7] * (RESPONSE - 1) + [EOS], {}, RESPONSE),  # the interaction is not asked
    ],
)
def test_an_interactions_text_that_does_not_fit_is_left_out(manager, ids, settings, tokens):
    made = manager(lambda row, turn: TokenOutput(token_ids=ids, stop_reason="completed"), interaction=True, **settings)
    output = generated(made, 1, agent="tool_agent", interaction_kwargs=[{"turns": 9}], tools_kwargs=[{}])
    assert output.non_tensor_batch["end_reason"].tolist() == ["length"]
    assert output.batch["response_mask"].sum() == output.batch["attention_mask"][:, PROMPT:].sum() == tokens


def test_a_trace_has_the_turns_and_the_calls_of_a_conversation(manager, tmp_path):
    made = manager(lambda row, turn: [7, EOS], interaction=True, trace={"backend": "jsonl"})
    try:
        generated(made, 2, agent="tool_agent", interaction_kwargs=[{"turns": 2}] * 2, tools_kwargs=[{}] * 2)
        (file,) = (tmp_path / "run" / "rollout_traces").iterdir()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    finally:
        RolloutTraceConfig.reset()
    assert [line["op"] for line in lines].count("ToolAgentLoop.run") == 2
    run = next(line for line in lines if line["op"] == "ToolAgentLoop.run" and line["sample_index"] == 1)
    assert run["output"]["response_ids"][:2] == [7, EOS] and run["step"] == 1


def test_arguments_in_a_file_outlast_the_import_of_their_class(tmp_path, monkeypatch):
    (tmp_path / "kept_loop.py").write_text(
        "from verl.agents.agent_loop import AgentLoopBase, register\n\n\n"
        "@register('kept')\nclass Kept(AgentLoopBase):\n"
        "    def __init__(self, turns=1):\n        self.turns = turns\n\n"
        "    async def run(self, sampling_params, **row): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_agent_loop_registry, "kept", {"_target_": "kept_loop.Kept", "turns": 3})
    assert [make_agent_loop("kept").turns for _ in range(2)] == [3, 3]
