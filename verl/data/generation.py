"""Prompts and answers of main_generation: read, checked, kept while the command runs, written."""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from loguru import logger

from verl.config.compose import to_plain
from verl.config.offline import GenerationConfig
from verl.data.fingerprint import data_fingerprint, model_dir_fingerprint, model_folder
from verl.data.rl_dataset import DatasetError, RLHFDataset, no_chat_template
from verl.utils.jsonl import read_objects, replace_text
from verl.utils.problems import Problem, one_line, wrong
from verl.utils.weight_files import WeightFileError

# Parts that main_generation shares with main_ppo name main_ppo's keys in their messages.
SHARED_KEYS = {"actor_rollout_ref.rollout.": "rollout.", "actor_rollout_ref.model.": "model."}
# Settings of speed and memory: answers may be resumed with other values.
WITHOUT_EFFECT = {"data.path", "data.output_path", "data.batch_size", "model.path"} | {
    f"rollout.{name}" for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
                                   "tensor_model_parallel_size")
}  # fmt: skip


def own_keys(message: str) -> str:
    """A message with the keys of main_generation in place of main_ppo's."""
    for key, own_key in SHARED_KEYS.items():
        message = message.replace(key, own_key)
    return message


class GenerationPrompts(RLHFDataset):
    """The prompts of data.path; raises DatasetError where they cannot be written next to their answers.

    `lengths` has the number of tokens, before truncation, of each prompt that was read.
    """

    length_key = "rollout.prompt_length"
    overlong_remedy = "Raise it, or set data.truncation to left, right or middle."

    def __init__(self, config: GenerationConfig, tokenizer: Any) -> None:
        import pyarrow as pa

        settings = {name: config.data[name] for name in ("prompt_key", "truncation")}
        settings |= {"apply_chat_template_kwargs": to_plain(config.data.apply_chat_template_kwargs)}
        super().__init__(config.data.path, tokenizer, settings | {"max_prompt_length": config.rollout.prompt_length})
        self.lengths: dict[int, int] = {}
        if not tokenizer.chat_template:
            raise DatasetError(no_chat_template(tokenizer))
        for name in dict.fromkeys(name for row in self.rows for name in row):
            try:
                write_table([{name: row.get(name)} for row in self.rows], [[""]] * len(self), io.BytesIO())
            except (pa.ArrowException, UnicodeError) as error:
                text = f"column {name!r} cannot be written as parquet next to the answers: {one_line(error)}"
                advice = "Remove that character" if isinstance(error, UnicodeError) else "Give it values of one type"
                raise DatasetError(f"{config.data.path}: {text}. {advice}.") from error

    def prompt_ids(self, item: int) -> list[int]:
        ids = super().prompt_ids(item)
        self.lengths[item] = len(ids)
        return ids

    def statistics(self) -> dict[str, str]:
        """Rows of a plan about the prompts that were read."""
        if not self.lengths:
            return {}
        longest, lengths = max(self.lengths, key=self.lengths.__getitem__), list(self.lengths.values())
        cut = sum(length > self.max_prompt_length for length in lengths)
        rows = {
            "tokens of all prompts": f"{sum(lengths):,}",
            "tokens of a prompt": f"mean {statistics.mean(lengths):,.1f}, median {statistics.median(lengths):,.0f}, "
            f"longest {max(lengths):,} (row {self.origins[longest][1]})",
        }
        return rows | ({"prompts that are too long": f"{cut:,}"} if cut else {})


class PartialAnswers:
    """Answers in the folder `<data.output_path>.partial`, from their generation until the output is written.

    settings.json holds what decides the answers, so that those of other prompts, models or settings are never mixed.
    Each process writes a file of its own, with a line for each prompt.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self.output = Path(config.data.output_path).expanduser()
        self.folder = self.output.with_name(f"{self.output.name}.partial")
        self.settings_file = self.folder / "settings.json"
        self.file = self.folder / f"{uuid4().hex[:12]}.jsonl"
        folder = model_folder(config.model.path)
        try:
            model = None if folder is None else model_dir_fingerprint(folder)
        except WeightFileError:  # whoever loads the model reports it
            model = None
        decides = {"data.path": data_fingerprint(config.data.path, 0)["files"][0]["sha256"], "model.path": model}
        for section in ("data", "model", "rollout"):
            values = {f"{section}.{name}": value for name, value in to_plain(config)[section].items()}
            decides |= {key: value for key, value in values.items() if key not in WITHOUT_EFFECT}
        self.settings = json.loads(json.dumps(decides))

    def problems(self) -> Iterator[Problem]:
        """Kept answers that other prompts, another model or other settings gave."""
        if not self.settings_file.is_file():
            return
        kept = json.loads(self.settings_file.read_text(encoding="utf-8"))
        if changed := [key for key in sorted({*kept, *self.settings}) if kept.get(key) != self.settings.get(key)]:
            what = f"{self.folder} keeps answers of a command that did not finish, but since then changed:"
            remedy = "Restore the former settings and files to resume it, or delete the folder to start again"
            yield wrong(changed[0], f"{what} {', '.join(changed)}. {remedy}, or name another data.output_path.")

    def open(self) -> None:
        """Make the folder, where it is missing, for these settings."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.settings_file, json.dumps(self.settings, indent=1, sort_keys=True))

    def add(self, numbers: Sequence[int], responses: Sequence[list[str]]) -> None:
        """Write the answers to the prompts of these numbers, which then survive the death of the process."""
        lines = [json.dumps({"row": i, "responses": texts}) for i, texts in zip(numbers, responses, strict=True)]
        with open(self.file, "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def read(self) -> dict[int, list[str]]:
        """The kept answers by the numbers of their prompts; without a line that a killed process left incomplete."""
        kept: dict[int, list[str]] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            kept |= {row["row"]: row["responses"] for _, row in read_objects(file, growing=True)}
        return kept

    def finish(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows with a column `responses` as parquet, atomically, then remove the folder."""
        kept = self.read()
        responses = [kept[i] for i in range(len(rows))]
        partial = self.output.with_name(f"{self.output.name}.tmp")
        write_table(rows, responses, partial)
        os.replace(partial, self.output)
        shutil.rmtree(self.folder)
        logger.info("{} rows with {} answers each written to {}", len(rows), len(responses[0]), self.output)


def write_table(rows: Sequence[dict[str, Any]], responses: list[list[str]], target: Any) -> None:
    """Write parquet to a path or a file: a column for each name that some row has, and `responses`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table({**columns, "responses": responses}), target)
