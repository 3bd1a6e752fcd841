"""Adapter of OpenEnv, whose environments servers hold: reset, step and state of a session.

    python -m verl.trainer.main_ppo data.environment.name=examples.environments.openenv_adapter.OpenEnv \\
        data.environment.url=http://127.0.0.1:8000 ...

Needs the package: pip install openenv==0.10.0, in a virtual environment of its own.
"""

import json
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from verl.agents.environments.base import Ask, Environment, Library, Message, NoMoreTurns, check_ranges, make_row


class OpenEnv(Environment):
    """The environment of the server at data.environment.url, with a session for each conversation.

    Item i is the reset with seed + i. data.environment.params may have `action`, the field of an action that the
    model's answer fills (by default the only required one; without one the answer is an action as JSON); `observation`,
    the field of an observation that the model reads (by default all fields, as JSON); and `reset`, further arguments of
    each reset.
    """

    LIBRARY = Library("openenv.core", "openenv", "0.10.0")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.settings
        if not settings.url:
            raise ValueError("OpenEnv needs data.environment.url, the address of the environment's server.")
        check_ranges(settings, seed=(settings.seed, settings.size), val_seed=(settings.val_seed, settings.val_size))
        known = ("action", "observation", "reset")
        if unknown := [name for name in settings.parameters if name not in known]:
            raise ValueError(f"data.environment.params.{unknown[0]}: unknown for openenv. Known: {', '.join(known)}.")
        self.source = next(iter(settings.weights), "openenv")

    async def __aenter__(self) -> "OpenEnv":
        url = self.settings.url.rstrip("/")
        async with httpx.AsyncClient(timeout=self.settings.timeout) as client:
            try:
                response = await client.get(f"{url}/schema")
                response.raise_for_status()
            except httpx.HTTPError as error:
                raise ConnectionError(f"data.environment.url={url}: no server of OpenEnv answers: {error}") from error
        schema = response.json()["action"]
        self.validator = Draft202012Validator(schema)
        required = schema.get("required") or []
        self.field = self.settings.parameters.get("action") or (required[0] if len(required) == 1 else None)
        return self

    def _client(self) -> Any:
        return self.library.GenericEnvClient(base_url=self.settings.url, message_timeout_s=self.settings.timeout)

    async def _reset(self, client: Any, seed: int) -> tuple[list[Message], Any]:
        """The first messages, and the result of the reset."""
        result = await client.reset(seed=seed, **self.settings.parameters.get("reset", {}))
        system = self.settings.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": self._text(result.observation)}], result

    def _text(self, observation: dict[str, Any]) -> str:
        field = self.settings.parameters.get("observation")
        if field is None:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            known = ", ".join(observation)
            raise ValueError(f"data.environment.params.observation={field}: observations have the fields {known}")
        return str(observation[field])

    def _action(self, answer: str) -> dict[str, Any] | str:
        """The action for an answer, or what is wrong with it."""
        try:
            action = {self.field: answer} if self.field else json.loads(answer)
        except ValueError:
            return "the answer is no action as JSON"
        wrong = best_match(self.validator.iter_errors(action))
        return action if wrong is None else f"the answer is no action: {wrong.message}"

    async def rows(self, split: str, files: list[str]) -> list[dict[str, Any]]:
        settings, rows = self.settings, []
        first, size = {"train": (settings.seed, settings.size), "val": (settings.val_seed, settings.val_size)}[split]
        async with self._client() as client:
            for number in range(size):
                messages, _ = await self._reset(client, first + number)
                item = {"task": self.source, "seed": first + number}
                rows.append(make_row(self.source, messages, None, number, item, settings))
        return rows

    async def converse(self, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
        """score: the sum of the steps' rewards; steps; and numbers of the state at the end, as state/NAME."""
        rewards: list[float] = []
        async with self._client() as client:
            messages, result = await self._reset(client, item["seed"])
            while not result.done:
                try:
                    reply = await ask(messages, None)
                except NoMoreTurns:
                    break
                action, text = self._action(reply["content"] or ""), None
                if isinstance(action, str):  # the model's fault: it may try again
                    text = f"Error: {action}."
                    rewards.append(0.0)
                else:
                    result = await client.step(action)
                    rewards += [] if result.reward is None else [float(result.reward)]
                    text = self._text(result.observation)
                messages = [*messages, {"role": "assistant", "content": reply["content"]},
                            {"role": "user", "content": text}]  # fmt: skip
            state = await client.state()
        if not rewards:
            turns = f"data.environment.max_turns (now {self.settings.max_turns})"
            raise ValueError(f"no step had a reward; raise {turns}, or let the server give one")
        numbers = {f"state/{name}": value for name, value in state.items() if isinstance(value, int | float)}
        return {**numbers, "score": sum(rewards), "acc": float(sum(rewards) >= 1.0), "steps": len(rewards)}
