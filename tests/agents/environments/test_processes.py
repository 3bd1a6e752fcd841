"""Processes of an environment: rows, scores and conversations; failures are named, and end nothing else."""

import asyncio
import contextlib
import time
from unittest.mock import AsyncMock, Mock

import pytest

from tests.agents.environments.conftest import SKYRL_GYM
from tests.helpers.rl_run import compose_run
from verl.agents.environments import hosting, processes
from verl.agents.environments.base import check_ranges
from verl.agents.environments.dataset import EnvironmentDataset
from verl.agents.environments.hosting import EnvironmentFailed
from verl.agents.environments.processes import EnvironmentCalls, EnvironmentPool, environment_rows
from verl.config.environment import EnvironmentConfig
from verl.data.rl_dataset import DatasetError
from verl.planning.ppo import rl_entry
from verl.trainer.ppo.data_loading import create_rl_dataset

pytestmark = pytest.mark.process


def settings(**more):
    return EnvironmentConfig(**{"name": SKYRL_GYM, "size": 6, "val_size": 2, "timeout": 3.0, **more})


def test_rows_and_scores_come_from_a_process(files):
    rows = environment_rows(settings(), files)
    assert [len(rows["train"]), len(rows["val"])] == [6, 2] and "agent_name" not in rows["train"][0]
    assert environment_rows(settings(max_turns=2), files)["train"][0]["agent_name"] == "environment_agent"
    item = rows["train"][5]["extra_info"]["environment"]
    with EnvironmentCalls(settings()) as calls:
        assert calls.call(60, "score", item, "yes") == {"score": 1.0, "acc": 1.0, "steps": 1}
        with pytest.raises(EnvironmentFailed, match=r"SkyRLGym \(task count, .*index 5\) raised ZeroDivisionError"):
            calls.call(60, "score", item, "crash")
        with pytest.raises(EnvironmentFailed, match="gave the score nan"):
            calls.call(60, "score", item, "nan")
        with pytest.raises(EnvironmentFailed, match="raised MemoryError"):
            calls.call(60, "score", item, "grow")
        with pytest.raises(EnvironmentFailed, match="something else than the row.* take another task"):
            calls.call(60, "score", {**item, "prompt": "other"}, "yes")
        with pytest.raises(EnvironmentFailed, match="score took longer than 1 s: raise data.environment.timeout"):
            calls.call(1, "score", item, "hang")
    with EnvironmentCalls(settings()) as calls, pytest.raises(EnvironmentFailed, match="exit code 3"):
        calls.call(60, "score", item, "die")


async def converse(pool, item, answers):
    """The scores of a conversation in which the model gives these answers; None stands for no further turn."""
    async with pool.conversation(item) as conversation:
        prompts = []
        for answer in answers:
            kind, content = await conversation.next()
            assert kind == "ask"
            prompts.append([message["content"] for message in content[0]])
            if answer is None:
                conversation.end("no token is left")
            else:
                conversation.reply({"role": "assistant", "content": answer, "finish_reason": "stop"})
        kind, scores = await conversation.next()
        assert kind == "done"
        return scores, prompts[-1]


async def test_conversations_fail_alone_and_are_scored_at_their_limits(files):
    item = environment_rows(settings(max_turns=3), files)["train"][0]["extra_info"]["environment"]
    pool = EnvironmentPool(settings(max_turns=3, num_workers=1, concurrency=4))
    with contextlib.closing(pool):
        given = (["no", "yes"], ["no", "no", "no"], ["no", None], ["crash"], ["nan", None], ["no", "yes"])
        results = await asyncio.gather(*(converse(pool, item, some) for some in given), return_exceptions=True)
        scores = [result[0]["score"] for result in results if not isinstance(result, Exception)]
        assert scores == [1.0, 0.0, 0.0, 1.0]
        assert results[0][1] == ["0 ?", "no", "again"] and results[1][0]["steps"] == 3
        assert "raised ZeroDivisionError" in str(results[3]) and "gave the score nan" in str(results[4])
        started = time.monotonic()
        with pytest.raises(EnvironmentFailed, match="took longer than data.environment.timeout=3 s: raise it$"):
            await converse(pool, item, ["hang"])
        assert time.monotonic() - started < 30
        with pytest.raises(EnvironmentFailed, match="its process ended"):
            await converse(pool, item, ["die"])
        assert (await converse(pool, item, ["yes"]))[0]["score"] == 1.0  # by a new process


async def test_a_process_is_used_and_ended_though_the_conversation_that_started_it_was_cancelled(files, monkeypatch):
    item = environment_rows(settings(max_turns=3), files)["train"][0]["extra_info"]["environment"]
    started, start = [], processes._start
    monkeypatch.setattr(processes, "_start", lambda *given: started.append(start(*given)) or started[-1])
    with contextlib.closing(EnvironmentPool(settings(max_turns=3, num_workers=2))) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(converse(pool, item, ["yes"]), 0.001)
        assert (await converse(pool, item, ["yes"]))[0]["score"] == 1.0
    assert len(started) == 1 and started[0].gone


async def test_an_environment_is_started_and_ended_once(monkeypatch):
    environment, connection = AsyncMock(), Mock(recv=Mock(side_effect=EOFError))
    environment.__aenter__.return_value = environment
    monkeypatch.setattr(hosting, "load_environment", Mock(return_value=environment))
    await hosting._Conversations(connection, {}).serve()
    assert environment.__aenter__.await_count == environment.__aexit__.await_count == 1
    connection.send.assert_called_once_with(("ready", None, None))


def test_a_data_set_names_what_the_environment_lacks(files, tmp_path, tiny_llama):
    from verl.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(tiny_llama)
    config = {"train_files": files["train"], "val_files": files["val"], "environment": dict(settings())}
    dataset = EnvironmentDataset([], tokenizer, config, is_train=False)
    assert len(dataset) == 2 and dataset[0]["raw_prompt"] == [{"role": "user", "content": "0 ?"}]
    (tmp_path / "train.jsonl").write_text('{"prompt": "text", "env_class": "count"}\n')
    config["environment"] = dict(settings(size=5))  # else the rows of before are kept
    with pytest.raises(DatasetError, match="row 0: there is no list of messages in the column 'prompt'"):
        EnvironmentDataset([], tokenizer, config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": "openenv"}, "openenv is unknown.*examples.environments.openenv_adapter.OpenEnv"),
        ({"name": "verifiers"}, "needs data.environment.tasks"),
        ({"name": "reasoning_gym", "tasks": ["gcd"], "max_turns": 2}, "set data.environment.max_turns=1"),
        ({"tasks": {"a": 0}}, "tasks.a: the weight must be a number above 0"),
        ({"tasks": ["a"], "params": {"b": {}}}, "params.b: no such task in data.environment.tasks: a"),
        ({"answer_pattern": "x(.*"}, r"answer_pattern=x\(\.\* is no regular expression: missing \)"),
        ({"answer_pattern": "x"}, "answer_pattern=x has no group: put parentheses around the answer"),
        ({"answer_format": '{"answer": "{}"}'}, r"answer_format=.*: write \{\} for the answer, and every other"),
    ],
)
def test_wrong_settings_are_named(more, message):
    with pytest.raises(ValueError, match=message):
        settings(**more)


def test_ranges_of_seeds_must_not_overlap():
    check_ranges(settings(), seed=(0, 10), val_seed=(10, 5))
    with pytest.raises(ValueError, match="data.environment.seed with 10 items takes the seeds 0 to 9.*val_seed begins"):
        check_ranges(settings(), seed=(0, 10), val_seed=(9, 5))


def test_the_dry_run_shows_a_prompt_a_scored_answer_and_lengths(files, tmp_path, tiny_llama, capsys):
    environment = {"name": SKYRL_GYM, "size": 8, "val_size": 2}
    more = {f"data__environment__{name}": value for name, value in environment.items()}
    more |= {f"data__{split}_files": names[0] for split, names in files.items()}
    config = compose_run(tmp_path / "run", tiny_llama, custom_reward_function__path="null", **more)
    assert rl_entry(create_rl_dataset).dry_run(config) == 0
    shown = capsys.readouterr().out
    assert "q : 0 ? a :" in shown and "score 0" in shown and "steps 1" in shown
    assert "tokens of the first 8 prompts" in shown and "6 to 6, median 6" in shown
    config.reward_model.num_workers = 0
    assert rl_entry(create_rl_dataset).dry_run(config) == 1
    assert "environments do not run in the trainer's process" in capsys.readouterr().out
