"""Environments of verifiers: its task sets and harnesses, scored by their own rewards."""

import itertools
import sys
import uuid
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from verl.agents.environments.adapters.verifiers_harness import HARNESS, harness_module
from verl.agents.environments.base import Ask, Environment, Library, Message, NoMoreTurns, import_path, make_row
from verl.agents.environments.hosting import EnvironmentFailed
from verl.agents.tools.schemas import with_text_arguments

#: What a harness reads as the end of the context.
OVER = "context_length_exceeded: this conversation may have no further turn"
SIZE_KEYS = {"train": "size", "val": "val_size"}


class Verifiers(Environment):
    """Environments by the names of their modules, installed or at data.environment.path.

    data.environment.params.NAME is the environment's configuration, as verifiers' `--env`: taskset, agent, ...; below
    `val` it has what differs for validation. Without `val`, validation takes the tasks after those of training. Unless
    `agent.harness` is set or the environment brings a harness, `ChatHarness` leads the conversation in this process.
    Harnesses reach the model at a server of this process, whose `model` is the number of the conversation.
    """

    LIBRARY = Library("verifiers.v1", "verifiers", "0.4.0")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import_path(self.settings.path)
        sys.modules[HARNESS] = harness_module(self.library)
        self.environments: dict[tuple[str, str], Any] = {}
        self.tasks: dict[tuple[str, str], list[Any]] = {}
        self._asks: dict[str, Ask] = {}
        self._failures: dict[str, EnvironmentFailed] = {}
        for name in self.settings.weights:
            params = dict(self.settings.parameters.get(name, {}))
            of_validation = params.pop("val", None)
            self._load(name, "train", params)
            if of_validation is not None:
                self._load(name, "val", _merged(params, of_validation))

    def _load(self, name: str, split: str, params: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

        agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, "max_turns": self.settings.max_turns}
        if default_harness_id(name) == "bash":
            agent["harness"] = {"id": HARNESS}
        config = resolve_env_config(_merged({"taskset": {"id": name}, "agent": agent}, params))
        self.environments[name, split] = load_environment(config)

    def _tasks(self, name: str, split: str) -> list[Any]:
        """The tasks of a split, which are the first of its environment, or follow those of training."""
        if (name, split) not in self.tasks:
            has_own = (name, split) in self.environments  # true for training
            start = 0 if has_own else self._number(name, "train")
            stop = start + self._number(name, split)
            tasks = list(itertools.islice(self._environment(name, split).taskset, start, stop))
            if len(tasks) < stop - start:
                others = f" or data.environment.size, or set other tasks in data.environment.params.{name}.val"
                raise ValueError(
                    f"data.environment.{SIZE_KEYS[split]}: {name} has {start + len(tasks)} tasks, and {stop} are "
                    f"needed. Lower it{'' if has_own else others}."
                )
            system = self.settings.system_prompt
            self.tasks[name, split] = [task if system is None else task.with_system_prompt(system) for task in tasks]
        return self.tasks[name, split]

    def _environment(self, name: str, split: str) -> Any:
        """The environment of a split; that of training also serves validation that has no settings of its own."""
        return self.environments.get((name, split)) or self.environments[name, "train"]

    def _number(self, name: str, split: str) -> int:
        """Tasks of a split, its size divided by weight."""
        weights, size = self.settings.weights, self.settings[SIZE_KEYS[split]]
        return max(1, round(size * weights[name] / sum(weights.values())))

    async def __aenter__(self) -> "Verifiers":
        self._stack = AsyncExitStack()
        application = web.Application(client_max_size=1 << 28)
        application.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(application)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        for environment in self.environments.values():
            await self._stack.enter_async_context(environment.serving())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def rows(self, split: str, files: list[str]) -> list[dict[str, Any]]:
        rows = []
        for name in self.settings.weights:
            for index, task in enumerate(self._tasks(name, split)):
                item = {"task": name, "split": split, "index": index}
                truth = getattr(task.data, "answer", None)
                truth = truth if isinstance(truth, str | int | float) else None
                rows.append(make_row(name, _prompt(task.data), truth, len(rows), item, self.settings))
        return rows

    async def converse(self, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
        """score: the sum of the weighted rewards; each reward and metric by its name."""
        task, number = self._tasks(item["task"], item["split"])[item["index"]], uuid.uuid4().hex
        environment = self._environment(item["task"], item["split"])
        client = self.library.EvalClientConfig(base_url=self.url, api_key_var="VERL_ENVIRONMENT_KEY")
        self._asks[number] = ask
        try:
            episode = await environment.run_episode(task, self.library.ModelContext(model=number, client=client))
        finally:
            del self._asks[number]
            failure = self._failures.pop(number, None)
        if failure is not None:
            raise failure
        if not episode.ok:
            errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
            text = f"{errors[0].type}: {errors[0].message}" if errors else "it gave no reason"
            raise RuntimeError(f"the episode failed: {text}")
        scores: dict[str, Any] = {}
        for trace in episode.traces:
            scores |= {name: value for name, value in trace.metrics.items() if value is not None}
            scores |= {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        score = float(sum(trace.reward for trace in episode.traces))
        return {**scores, "score": score, "acc": float(score >= 1.0)}

    async def _complete(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions, as OpenAI's: one choice, without streaming."""
        body = await request.json()
        ask = self._asks.get(body.get("model"))
        if ask is None:
            return _refusal(404, "there is no conversation of this number")
        if body.get("stream") or (body.get("n") or 1) > 1:
            return _refusal(400, f"streams and several choices are not supported here; use the harness {HARNESS}")
        try:
            reply = await ask([_plain(message) for message in body["messages"]], body.get("tools") or None)
        except NoMoreTurns as error:
            return _refusal(400, f"{OVER}: {error}")
        except EnvironmentFailed as error:
            self._failures[body["model"]] = error
            return _refusal(400, str(error))
        message: dict[str, Any] = {"role": "assistant", "content": reply["content"]}
        reason = reply["finish_reason"]
        if reply.get("tool_calls"):
            reason = "tool_calls" if reason == "stop" else reason
            message["tool_calls"] = [with_text_arguments(call) for call in reply["tool_calls"]]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        answer = {"id": uuid.uuid4().hex, "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**answer, "choices": [choice]})


def _refusal(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "type": "invalid_request_error"}}, status=status)


def _merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The settings, with `more` on top, section by section."""
    merged = dict(settings)
    for name, value in more.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged


def _prompt(data: Any) -> list[Message]:
    """The first messages of a task; an empty question where the environment opens the conversation."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt or ""}]
    return [*system, *(_plain(message.model_dump(exclude_none=True)) for message in data.prompt)]


def _plain(message: Message) -> Message:
    """A message whose content is text; TypeError for images and other parts."""
    content = message.get("content")
    if isinstance(content, list):
        if other := next((part for part in content if part.get("type") != "text"), None):
            raise TypeError(f"a message has a part of type {other.get('type')!r}; models read text only")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content or ""}
