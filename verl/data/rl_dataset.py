"""Prompts for reinforcement learning: rows of parquet or JSON files, rendered and tokenised."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch.utils.data import Dataset

from verl.config.compose import to_settings
from verl.config.data import DataConfig
from verl.data.chat_template import ChatTemplateError, render_chat
from verl.data.parquet import open_parquet
from verl.protocol.serialization import object_array
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.jsonl import read_objects
from verl.utils.problems import one_line

TOOLS = "pkg://verl.agents.tools.tool_registry"  # imported where there are tools
TRUNCATIONS = ("error", "left", "right", "middle")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns that no supported model reads


class DatasetError(ValueError):
    """A data file or one of its rows cannot be used; the message names the file, the row and the solution."""


class MissingColumn(DatasetError):
    """A row lacks a column, most likely as all rows of its file do."""


def no_chat_template(tokenizer: Any) -> str:
    """The error message for a tokenizer without a chat template."""
    return (
        f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which turns messages into prompts. Set "
        "actor_rollout_ref.model.custom_chat_template, or name a tokenizer that has one in "
        "actor_rollout_ref.model.tokenizer_path."
    )


def collate_fn(data_list: list[dict]) -> dict:
    """Samples to a batch: tensors of a key are stacked to [B, ...], numpy scalars become an array of their
    type [B], anything else an object array [B]."""
    columns: dict[str, list] = defaultdict(list)
    for sample in data_list:
        for key, value in sample.items():
            columns[key].append(value)
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for key, values in columns.items():
        if len(values) != len(data_list):
            raise ValueError(f"column '{key}' is in {len(values)} of {len(data_list)} samples; every one needs it.")
        if isinstance(values[0], torch.Tensor):
            batch[key] = torch.stack(values)
        elif isinstance(values[0], np.generic):
            batch[key] = np.array(values)
        else:
            batch[key] = object_array(values)
    return batch


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a .parquet, .jsonl or .json file (a list of objects, or one object per line) as plain Python.

    Raises DatasetError for a file that cannot be read, also when the checksum of a parquet page does not match, or
    when the rows of one would take far more memory than data of its size (see `open_parquet`).
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DatasetError(f"{path}: file does not exist.")
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise DatasetError(f"{path}: unknown kind of file {path.suffix!r}; known: .parquet, .jsonl, .json.")
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                rows = file.read().to_pylist()
        elif (text := path.read_text(encoding="utf-8")).lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [row for _, row in read_objects(path)]
    except Exception as error:  # a truncated file makes its reader raise almost anything
        raise DatasetError(f"{path}: cannot be read as {path.suffix[1:]}: {one_line(error)}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, row {number}: {one_line(row)} is not an object of column: value pairs.")
    return rows


def truncate_ids(ids: list[int], limit: int, how: str) -> list[int]:
    """At most `limit` ids: `left` drops the first ones, `right` the last, `middle` those between the ends."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[len(ids) - limit :]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    raise ValueError(f"{len(ids)} tokens exceed the limit of {limit} and data.truncation={how!r} does not truncate.")


def left_pad(ids: list[int], length: int, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask, position_ids), each int64 [length]; positions count from the first real token."""
    padding = length - len(ids)
    input_ids = torch.tensor([pad_id] * padding + ids, dtype=torch.int64)
    attention_mask = torch.tensor([0] * padding + [1] * len(ids), dtype=torch.int64)
    return input_ids, attention_mask, (attention_mask.cumsum(0) - 1).clamp(min=0)


class FileRows(Dataset):
    """The rows of data files (local or hdfs://), each with its origin; a subclass turns them into samples."""

    for_conversations = "Set data.prompt_key=messages."  # what to do about a column `messages`

    def __init__(self, data_files: str | Sequence[str], use_shm: bool = False) -> None:
        self.data_files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        self.rows: Sequence[dict[str, Any]] = []
        self.origins: list[tuple[str, int]] = []  # file and row (from 0) of each sample
        self.columns: dict[str, None] = {}  # of any file
        self.cut_rows: set[int] = set()  # samples of this process that data.truncation cut
        columns_of: dict[str, dict[str, None]] = {}
        for file in map(str, self.data_files):
            rows = self.load(file, use_shm)
            if isinstance(rows, list):  # another type knows the columns of its rows itself
                for number, row in enumerate(rows):
                    _refuse_media(row, f"{file}, row {number}")
                columns_of[file] = dict.fromkeys(name for row in rows for name in row)
                self.columns |= columns_of[file]
            self.rows = self.rows + rows if self.origins else rows
            self.origins += [(file, number) for number in range(len(rows))]
        if not len(self.rows):
            raise DatasetError(f"{', '.join(map(str, self.data_files))}: no rows.")
        for file, columns in columns_of.items():
            if columns and (missing := [name for name in self.columns if name not in columns]):
                logger.info("{} has no column {}, which other files have: None in its rows", file, ", ".join(missing))

    def load(self, file: str, use_shm: bool) -> Sequence[dict[str, Any]]:
        """The rows of a file that may be remote."""
        return self.read(copy_to_local(file, use_shm=use_shm))

    @staticmethod
    def read(path: str | Path) -> Sequence[dict[str, Any]]:
        """The rows of one file, which can be added to those of another; raises DatasetError."""
        return read_rows(path)

    def _keep(self, numbers: list[int]) -> None:
        self.rows = [self.rows[i] for i in numbers]
        self.origins = [self.origins[i] for i in numbers]

    def draw(self, max_samples: int, config: Mapping[str, Any]) -> None:
        """Keep `max_samples` rows: drawn by data.seed with data.shuffle, else the first ones; -1 keeps all."""
        if 0 <= max_samples < len(self.rows):
            order = range(len(self.rows))
            settings = to_settings(config, DataConfig, checked=False)
            if settings.shuffle:
                order = np.random.default_rng(settings.seed).permutation(len(self.rows)).tolist()
            self._keep(order[:max_samples])

    def column(self, item: int, name: str, setting: str, also: Mapping[str, str] | None = None) -> Any:
        """A column of a row; `setting` is the key to change when there is none.

        `also` maps the settings of further columns to their names: the error names those that are missing as well.
        """
        row = self.rows[item]
        if name not in row:
            missing = {setting: name} | {key: other for key, other in (also or {}).items() if other not in row}
            names = " and no column ".join(f"'{other}'" for other in missing.values())
            what = f"there is no column {names} (columns: {', '.join(row)}). Set {' and '.join(missing)}."
            if isinstance(row.get("messages"), list) and setting == "data.prompt_key":
                what = f"there is no column '{name}', but conversations in 'messages'. {self.for_conversations}"
            raise MissingColumn(str(self.error(item, what)))
        return row[name]

    def chat(self, item: int, name: str, setting: str) -> list[dict[str, Any]]:
        """A column that holds chat messages, as text: without nulls (see `plain`), and text parts joined."""
        messages = self.column(item, name, setting)
        if not isinstance(messages, list) or not messages:
            what = f"column '{name}' is {_kind(messages)}; expected a list of {{role, content}}. "
            raise self.error(item, f"{what}{'Wrap' if messages else 'Fill'} it, or set {setting}.")
        chat = []
        for number, message in enumerate(messages):
            where = f"column '{name}', message {number}"
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise self.error(item, f"{where} is {message!r}; expected {{role, content}}.")
            given = {key: value for key, value in message.items() if value is not None or key == "content"}
            content = self._text(item, given["content"], where)
            chat.append({key: self.plain(item, value) for key, value in given.items()} | {"content": content})
        return chat

    def plain(self, item: int, value: Any) -> Any:
        """A value of a row without what parquet adds to it: null for each key that structs of other rows have."""
        return _without_nulls(value) if str(self.origins[item][0]).endswith(".parquet") else value

    def _text(self, item: int, content: Any, where: str) -> Any:
        """The content of a message; a list of text parts is joined. DatasetError for a part of another type."""
        if not isinstance(content, list):
            return content
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        for part in parts:
            kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise self.error(item, f"{where} has a part of type {kind!r}; models read text only. Leave it out.")
        return "".join(part["text"] for part in parts)

    def encodable(self, item: int, text: str) -> str:
        """The text; DatasetError where it has half a surrogate pair, which no tokenizer takes."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half, around = ascii(text[error.start]), ascii(text[max(0, error.start - 20) : error.start + 20])
            what = f"its text has half a surrogate pair ({half}), which cannot be encoded, in {around}. Correct it."
            raise self.error(item, what) from error
        return text

    def error(self, item: int, what: str) -> DatasetError:
        """An error about one row, with its file."""
        file, number = self.origins[item]
        return DatasetError(f"{file}, row {number}: {what}")

    def __len__(self) -> int:
        return len(self.rows)


class RLHFDataset(FileRows):
    """One sample per prompt: input_ids, attention_mask, position_ids [P] int64 (left-padded to data.max_prompt_length),
    raw_prompt_ids (list, cut but not padded), raw_prompt (messages), index, sample_index, tools_kwargs and
    interaction_kwargs (of extra_info), full_prompts (text, with data.return_full_prompt), every other column of the
    files, None where a row lacks it.

    `config` is the `data` section, or the part of it that differs from the defaults: prompt_key, max_prompt_length,
    truncation, filter_overlong_prompts, apply_chat_template_kwargs, shuffle, seed. `max_samples` keeps that many rows,
    drawn by data.seed with data.shuffle, else the first ones; -1 keeps all.
    """

    #: the key of max_prompt_length, and what to do about a longer prompt, for error messages
    length_key = "data.max_prompt_length"
    overlong_remedy = "Raise it, set data.filter_overlong_prompts=true, or data.truncation to left, right or middle."

    def __init__(
        self, data_files: str | list[str], tokenizer: Any, config: Mapping[str, Any], processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.config, self.settings = config, to_settings(config, DataConfig, checked=False)
        super().__init__(data_files, self.settings.use_shm)
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_key = self.settings.prompt_key
        self.max_prompt_length = self.settings.max_prompt_length
        self.truncation = self.settings.truncation
        self.return_full_prompt = self.settings.return_full_prompt
        if self.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation={self.truncation!r} is unknown. Known: {', '.join(TRUNCATIONS)}.")
        self.template_kwargs = dict(self.settings.apply_chat_template_kwargs or {})
        files = [self.settings.tool_config_path, self.settings.function_tool_path]
        if any(files):
            self.template_kwargs["tools"] = load_extern_object(TOOLS, "schemas_of_files")(*files)
        self.dropped_overlong = 0
        self.draw(max_samples, self.settings)
        self.maybe_filter_out_long_prompts()

    def maybe_filter_out_long_prompts(self) -> None:
        """With data.filter_overlong_prompts, drop rows whose templated prompt exceeds max_prompt_length; count them."""
        if not (self.settings.filter_overlong_prompts and len(self.rows)):  # max_samples=0 leaves no rows
            return
        before, workers = len(self.rows), self.settings.filter_overlong_prompts_workers
        if workers > 1:  # forked, so that rows and tokenizer are not copied
            with ProcessPoolExecutor(workers, get_context("fork"), _share, (self,)) as pool:
                lengths = list(pool.map(_prompt_length, range(before), chunksize=math.ceil(before / workers)))
        else:
            lengths = [len(self.prompt_ids(i)) for i in range(before)]
        self._keep([i for i, length in enumerate(lengths) if length <= self.max_prompt_length])
        self.dropped_overlong = before - len(self.rows)
        text = "data.filter_overlong_prompts: {} of {} rows kept, {} exceed data.max_prompt_length={}"
        logger.info(text, len(self.rows), before, self.dropped_overlong, self.max_prompt_length)
        if not self.rows:
            what = f"every one of {before} prompts exceeds data.max_prompt_length={self.max_prompt_length}. Raise it."
            raise DatasetError(f"{', '.join(map(str, self.data_files))}: {what}")

    def messages(self, item: int) -> list[dict[str, Any]]:
        """The chat messages of a row."""
        return self.chat(item, self.prompt_key, "data.prompt_key")

    def prompt_text(self, item: int) -> str:
        """A row's prompt through the chat template."""
        messages = self.messages(item)
        if not self.tokenizer.chat_template:
            raise DatasetError(no_chat_template(self.tokenizer))
        try:
            text = render_chat(self.tokenizer, messages, **{"add_generation_prompt": True, **self.template_kwargs})
        except ChatTemplateError as error:
            raise self.error(item, f"the chat template failed on column '{self.prompt_key}': {error}") from error
        return self.encodable(item, text)

    def prompt_ids(self, item: int) -> list[int]:
        """The ids of `prompt_text`, neither truncated nor padded."""
        return self.tokenizer(self.prompt_text(item), add_special_tokens=False)["input_ids"]

    def __getitem__(self, item: int) -> dict[str, Any]:
        ids = self.prompt_ids(item)
        if len(ids) > self.max_prompt_length:
            if self.truncation == "error":
                limit = f"{self.length_key}={self.max_prompt_length}"
                raise self.error(item, f"the prompt has {len(ids)} tokens, {limit}. {self.overlong_remedy}")
            self.cut_rows.add(item)
        ids = truncate_ids(ids, self.max_prompt_length, self.truncation)
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            raise ValueError("the tokenizer has no pad token; set one (tokenizer.pad_token = tokenizer.eos_token).")
        input_ids, attention_mask, position_ids = left_pad(ids, self.max_prompt_length, pad_id)
        row = {name: self.rows[item].get(name) for name in self.columns if name != self.prompt_key}
        extra = row["extra_info"] if isinstance(row.get("extra_info"), Mapping) else {}
        if self.return_full_prompt:
            row["full_prompts"] = self.prompt_text(item)
        return {
            **row,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "raw_prompt_ids": ids,
            "raw_prompt": self.messages(item),
            "index": extra["index"] if extra.get("index") is not None else item,
            "sample_index": np.int64(item),
            "tools_kwargs": self.plain(item, extra.get("tools_kwargs") or {}),
            "interaction_kwargs": self.plain(item, extra.get("interaction_kwargs") or {}),
        }

    def resume_dataset_state(self) -> None:
        """Nothing to restore: a run reads the rows again when it starts."""


def _share(dataset: RLHFDataset) -> None:
    """Initializer of a worker process: give `_prompt_length`, which gets row numbers only, the data set."""
    global _shared
    _shared = dataset


def _prompt_length(item: int) -> int:
    return len(_shared.prompt_ids(item))


def get_dataset_class(data_config: Mapping[str, Any]) -> type[Dataset]:
    """RLHFDataset, or the class that `data.custom_cls.{path,name}` names (a torch Dataset)."""
    return custom_dataset_class(data_config) or RLHFDataset


def custom_dataset_class(data_config: Mapping[str, Any]) -> type[Dataset] | None:
    """The class that `data.custom_cls.{path,name}` names; None where it names none."""
    custom = to_settings(data_config, DataConfig, checked=False).custom_cls
    if custom.path is None:
        return None
    loaded = load_extern_object(custom.path, custom.name)
    if not (isinstance(loaded, type) and issubclass(loaded, Dataset)):
        what = f"data.custom_cls.name={custom.name!r} in {custom.path} is {loaded!r}"
        raise TypeError(f"{what}; a subclass of torch.utils.data.Dataset is needed.")
    return loaded


def _refuse_media(row: Mapping[str, Any], where: str) -> None:
    """Raise DatasetError for a row with images, videos or sounds."""
    if column := next((name for name in MEDIA if row.get(name)), None):
        what = f"{where}: column '{column}' has images, videos or sounds; models read text only."
        raise DatasetError(f"{what} Leave such rows out, or drop the column if the text is enough.")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    known = {str: "a string", type(None): "missing", dict: "an object", list: "an empty list"}
    return known[type(value)] if type(value) in known else f"a {type(value).__name__}"
