"""Instruction and response pairs, all tokenised and checked before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from loguru import logger

from dllm_reasoning.config.iterative import IterativeDataConfig
from verl.data.rl_dataset import DatasetError
from verl.data.sft_dataset import Segment, SFTDataset, encode_segments, pad_sample

ROW_COLUMN = "row"  # of a sample: its number in the data set
Encoded = tuple[list[int], list[int]]
"""(ids, learned) of a sample: learned is 1 on the response and its EOS, 0 on the instruction."""


class IterativeSFTDataset(SFTDataset):
    """SFTDataset's rows, all tokenised at construction, so that a bad one is reported at once.

    Settings in addition to SFTDataset's: use_chat_template; bad_rows, which says whether a bad row stops the run or is
    left out. `encoded` has the rows that are kept, `skipped` counts the others.
    """

    config_type = IterativeDataConfig

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: Mapping[str, Any], max_samples: int = -1
    ) -> None:
        super().__init__(parquet_files, tokenizer, config, max_samples)
        for kind, token in (("eos", self.tokenizer.eos_token_id), ("pad", self.tokenizer.pad_token_id)):
            if token is None:
                raise ValueError(f"the tokenizer {self.tokenizer.name_or_path!r} has no {kind} token; add one to its "
                                 "tokenizer_config.json.")  # fmt: skip
        self.encoded: list[Encoded] = []
        kept, self.skipped = [], 0
        for item in range(len(self)):
            try:
                self.encoded.append(self.encode(item))
                kept.append(item)
            except DatasetError as error:
                if self.settings.bad_rows == "stop":
                    raise
                self.skipped += 1
                logger.debug("{}", error)
        if self.skipped:
            logger.warning("{} of {} rows are left out (data.bad_rows=skip); LOGURU_LEVEL=DEBUG names each",
                           self.skipped, self.skipped + len(kept))  # fmt: skip
        if not kept:
            raise DatasetError(f"{', '.join(map(str, self.data_files))}: no row can be trained on.")
        self.cut_rows = {new for new, old in enumerate(kept) if old in self.cut_rows}
        self._keep(kept)

    def segments(self, item: int, response: str | None = None) -> list[Segment]:
        """The instruction as the model reads it, then the response with EOS; `response` replaces the row's own."""
        text = self.text_of(item, "prompt")
        if response is None:
            response = self.text_of(item, "response")
            if not response.strip():
                raise self.error(item, f"column '{self.settings.response_key}' is empty; a response needs some text.")
        if self.settings.use_chat_template:
            text = self.render(item, [{"role": "user", "content": text}], add_generation_prompt=True)
        return [(text, False), (f"{response}{self.tokenizer.eos_token}", True)]

    def encode(self, item: int) -> Encoded:
        """As SFTDataset's, but a row needs a token of the instruction and one of the response after truncation.

        Raises DatasetError that says which of the two is missing, and why.
        """
        ids, learned = super().encode(item)
        if 0 < sum(learned) < len(learned):  # both parts are left
            return ids, learned
        learned = encode_segments(self.tokenizer, self.segments(item))[1]  # before truncation
        prompt, response = learned.count(0), learned.count(1)
        if prompt == 0:
            raise self.error(
                item, f"column '{self.settings.prompt_key}' has no tokens; nothing predicts the response's first token."
            )
        limit = self.max_length
        part, size = ("instruction", prompt) if prompt >= limit else ("response", response)
        what = f"the {part} has {size} tokens, so that data.max_length={limit} leaves nothing of the other part"
        raise self.error(item, f"{what}. Raise it.")

    def instruction_ids(self, item: int) -> list[int]:
        """The ids of the instruction, as generation gets them."""
        ids, learned = self.encoded[item]
        return ids[: learned.index(1)]

    def extend(self, other: IterativeSFTDataset) -> IterativeSFTDataset:
        """Append the rows of another data set; returns this one."""
        self.data_files = [*self.data_files, *other.data_files]
        self.rows, self.origins = self.rows + other.rows, self.origins + other.origins
        self.cut_rows |= {len(self.encoded) + row for row in other.cut_rows}
        self.encoded, self.skipped = self.encoded + other.encoded, self.skipped + other.skipped
        return self

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """SFTDataset's columns, and `row`, the number of the row (int64 [])."""
        columns = pad_sample(*self.encoded[item], self.max_length, self.tokenizer.pad_token_id)
        return {**columns, ROW_COLUMN: torch.tensor(item)}
