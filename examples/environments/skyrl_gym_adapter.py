"""Adapter of skyrl-gym, with prompts in SkyRL's data format.

    python -m verl.trainer.main_ppo data.environment.name=examples.environments.skyrl_gym_adapter.SkyRLGym \\
        data.environment.tasks=[gsm8k] data.train_files=train.parquet data.val_files=val.parquet ...

Needs the package: pip install skyrl-gym==0.4.0, in a virtual environment of its own.
"""

import asyncio
import functools
from typing import Any

from verl.agents.environments.base import Ask, Environment, Library, NoMoreTurns, import_path, make_row
from verl.data.rl_dataset import read_rows
from verl.utils.fs import copy_to_local


class SkyRLGym(Environment):
    """Text environments by their registered name, such as gsm8k.

    Prompts come from data.train_files and data.val_files, in SkyRL's format: `prompt`, and columns that the environment
    gets as its `extras` (such as reward_spec). A row's `env_class` names its environment; rows without it have the only
    one of data.environment.tasks. data.environment.params.NAME is the environment's `env_config`. Importing
    data.environment.path registers further ones.
    """

    LIBRARY = Library("skyrl_gym", "skyrl-gym", "0.4.0")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import_path(self.settings.path)
        self._read = functools.cache(lambda file: read_rows(copy_to_local(file)))

    async def rows(self, split: str, files: list[str]) -> list[dict[str, Any]]:
        settings, rows, names = self.settings, [], list(self.settings.weights)
        for file in files:
            for number, row in enumerate(self._read(file)):
                name = row.get("env_class") or (names[0] if len(names) == 1 else None)
                if name is None or (names and name not in names):
                    where = f"{file}, row {number}: env_class={name!r}"
                    known = f"data.environment.tasks names {', '.join(names) or 'no environment'}"
                    raise ValueError(f"{where}; {known}. Set the row's env_class, or data.environment.tasks.")
                if not isinstance(row.get("prompt"), list):
                    raise ValueError(f"{file}, row {number}: there is no list of messages in the column 'prompt'.")
                item = {"task": name, "file": file, "index": number}
                environment = self._make(item, row)
                messages, _ = await asyncio.to_thread(environment.init, [dict(message) for message in row["prompt"]])
                await asyncio.to_thread(environment.close)
                truth = (row.get("reward_spec") or {}).get("ground_truth")
                rows.append(make_row(row.get("data_source") or name, messages, truth, len(rows), item, settings))
                if len(rows) == settings[{"train": "size", "val": "val_size"}[split]]:
                    return rows
        return rows

    def _make(self, item: dict[str, Any], row: dict[str, Any]) -> Any:
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        extras["max_turns"] = self.settings.max_turns
        return self.library.make(item["task"], env_config=_EnvConfig(self.settings.parameters.get(item["task"], {})),
                                 extras=extras)  # fmt: skip

    async def converse(self, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
        """score: the sum of the steps' rewards; further numbers are those of the environment's `get_metrics`."""
        row = self._read(item["file"])[item["index"]]
        environment = self._make(item, row)
        try:
            messages, _ = await asyncio.to_thread(environment.init, [dict(message) for message in row["prompt"]])
            score = 0.0
            while True:
                try:
                    reply = await ask(messages, None)
                except NoMoreTurns:
                    break
                output = await asyncio.to_thread(environment.step, reply["content"] or "")
                score += float(output["reward"])
                if output["done"]:
                    break
                messages = [*messages, {"role": "assistant", "content": reply["content"]}, *output["observations"]]
            metrics = {name: value for name, value in environment.get_metrics().items() if _is_number(value)}
            return {**metrics, "score": score, "acc": float(score >= 1.0)}
        finally:
            await asyncio.to_thread(environment.close)


class _EnvConfig(dict):
    """The settings of an environment, which reads them as items, by `get` or as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            known = ", ".join(self) or "none"
            raise AttributeError(f"data.environment.params of the task must have {name!r}; it has {known}")
        return self[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
