"""Question and answer pairs for supervised fine-tuning, tokenised and masked."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from verl.config.compose import to_settings
from verl.config.sft import SFTDataConfig
from verl.data.chat_template import ChatTemplateError, render_chat
from verl.data.rl_dataset import FileRows, custom_dataset_class, truncate_ids
from verl.utils.tokenizer import hf_tokenizer, special_ids, stop_ids, use_chat_template

Segment = tuple[str, bool]
"""Part of a sample's text, and whether its tokens count in the loss."""


def encode_segments(tokenizer: Any, segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """(ids, learned) of the joined pieces, each of length T; learned is 1 where a token counts in the loss, else 0.

    Each piece is tokenised by itself, so that a prompt has the same tokens as in generation. A learned piece is learned
    up to and including its end of turn; what a template writes after that, such as a line break, is not. Without an end
    of turn all of the piece is learned, and if it is the sample's last piece, the EOS token is added.
    """
    ids: list[int] = []
    learned: list[int] = []
    stops = set(stop_ids(tokenizer))
    special = special_ids(tokenizer) | stops
    for number, (text, counts) in enumerate(segments, 1):
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        end = _end_of_turn(tokenizer, piece, special, stops)
        if end is None:
            if counts and number == len(segments):
                piece = [*piece, tokenizer.eos_token_id]
            end = len(piece)
        ids += piece
        learned += [int(counts and i < end) for i in range(len(piece))]
    return ids, learned


def _end_of_turn(tokenizer: Any, piece: list[int], special: set[int], stops: set[int]) -> int | None:
    """Number of ids up to and including the end of turn; None without one.

    It is the last special token, if that is one of `stops` or only white space follows it.
    """
    end = next((i for i in range(len(piece), 0, -1) if piece[i - 1] in special), None)
    ends = end is not None and (piece[end - 1] in stops or not tokenizer.decode(piece[end:]).strip())
    return end if ends else None


class SFTDataset(FileRows):
    """One sample per row: input_ids, attention_mask, position_ids, loss_mask, each int64 [max_length], right-padded.

    loss_mask is 1 on the tokens that are to be predicted, the answer and its EOS; it is not shifted. The question is a
    user's turn in the chat template. `config` is the `data` section, or the part of it that differs from the defaults:
    prompt_key, prompt_dict_keys, response_key, response_dict_keys, max_length, truncation, chat_template,
    apply_chat_template_kwargs. `max_samples` keeps the first rows; -1 keeps all.
    """

    #: dataclass of the section `data`; a subclass with more settings sets its own
    config_type: type[SFTDataConfig] = SFTDataConfig
    #: advice of the error for a file with conversations
    for_conversations = "Set data.multiturn.enable=true."

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: Mapping[str, Any], max_samples: int = -1
    ) -> None:
        super().__init__(parquet_files)
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.config, self.settings = config, to_settings(config, self.config_type, checked=False)
        use_chat_template(self.tokenizer, self.settings.chat_template)
        self.max_length = self.settings.max_length
        self.truncation = self.settings.truncation
        self.template_kwargs = dict(self.settings.apply_chat_template_kwargs or {})
        if max_samples >= 0:
            self._keep(list(range(min(max_samples, len(self)))))

    def text_of(self, item: int, kind: str) -> str:
        """The text of a row's `prompt` or `response`: in column data.{kind}_key, by the keys data.{kind}_dict_keys."""
        name = self.settings[f"{kind}_key"]
        both = {f"data.{each}_key": self.settings[f"{each}_key"] for each in ("prompt", "response")}
        value = self.column(item, name, f"data.{kind}_key", both)  # the error names both if both are missing
        path = f"column '{name}'"
        for key in self.settings[f"{kind}_dict_keys"] or []:
            if not isinstance(value, Mapping) or key not in value:
                have = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise self.error(item, f"{path} has no key '{key}' (it holds: {have}). Set data.{kind}_dict_keys.")
            value, path = value[key], f"{path}.{key}"
        if not isinstance(value, str):
            what = f"{path} is a {type(value).__name__}, not a text"
            raise self.error(item, f"{what}. Set data.{kind}_key or data.{kind}_dict_keys.")
        return value

    def render(self, item: int, messages: list[dict[str, Any]], **settings: Any) -> str:
        """The chat template's text of these messages."""
        try:
            return render_chat(self.tokenizer, messages, **{**self.template_kwargs, **settings})
        except ChatTemplateError as error:
            raise self.error(item, f"the chat template failed: {error}") from error

    def segments(self, item: int) -> list[Segment]:
        """The prompt as generation would see it (not learned), and the answer with EOS (learned)."""
        prompt, response = self.text_of(item, "prompt"), self.text_of(item, "response")
        asked = self.render(item, [{"role": "user", "content": prompt}], add_generation_prompt=True)
        return [(asked, False), (f"{response}{self.tokenizer.eos_token}", True)]

    def encode(self, item: int) -> tuple[list[int], list[int]]:
        """(ids, learned) of a row, each of at most max_length; a row that is cut is noted in `cut_rows`.

        Raises DatasetError for a longer row if truncation is `error`.
        """
        segments = [(self.encodable(item, text), counts) for text, counts in self.segments(item)]
        ids, learned = encode_segments(self.tokenizer, segments)
        if len(ids) > self.max_length:
            if self.truncation == "error":
                what = f"the sample has {len(ids)} tokens, data.max_length={self.max_length}"
                raise self.error(item, f"{what}. Raise it, or set data.truncation to left or right.")
            self.cut_rows.add(item)
        return tuple(truncate_ids(values, self.max_length, self.truncation) for values in (ids, learned))

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return pad_sample(*self.encode(item), self.max_length, self.tokenizer.pad_token_id)


def pad_sample(ids: list[int], learned: list[int], length: int, pad_id: int) -> dict[str, torch.Tensor]:
    """A sample of at most `length` tokens as tensors, each int64 [length]; `learned` becomes loss_mask.

    position_ids of padding are 0.
    """
    missing = length - len(ids)
    columns = {
        "input_ids": ids + [pad_id] * missing,
        "attention_mask": [1] * len(ids) + [0] * missing,
        "position_ids": [*range(len(ids))] + [0] * missing,
        "loss_mask": learned + [0] * missing,
    }
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}


def get_sft_dataset_class(data_config: Mapping[str, Any]) -> type[Dataset]:
    """The class of `data.custom_cls`, else MultiTurnSFTDataset with data.multiturn.enable, else SFTDataset."""
    from verl.data.multiturn_sft_dataset import MultiTurnSFTDataset

    several_turns = to_settings(data_config, SFTDataConfig, checked=False).multiturn.enable
    return custom_dataset_class(data_config) or (MultiTurnSFTDataset if several_turns else SFTDataset)
