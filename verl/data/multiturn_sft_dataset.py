"""Conversations for supervised fine-tuning, in which every assistant turn is learned."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.rl_dataset import DatasetError
from verl.data.sft_dataset import Segment, SFTDataset

TURN = "__turn__"  # column: number of the message that is learned (data.multiturn.row_per_turn)


class MultiTurnSFTDataset(SFTDataset):
    """SFTDataset whose rows hold messages, tools and enable_thinking (`data.multiturn.*_key`; the last two may be
    missing). loss_mask is 1 on each assistant turn, its end-of-turn token included, 0 on every other token.

    With `data.multiturn.row_per_turn` each assistant turn is a sample: the prompt that the template renders of the
    messages before it, and the turn. A template may then render earlier turns differently.
    """

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: Mapping[str, Any], processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        super().__init__(parquet_files, tokenizer, config, max_samples)
        self.processor = processor
        self.keys = self.settings.multiturn
        if self.keys["row_per_turn"]:
            turns = [self._turns(row) for row in self.rows]
            self.origins = [origin for origin, own in zip(self.origins, turns, strict=True) for _ in own]
            self.rows = [{**row, TURN: n} for row, own in zip(self.rows, turns, strict=True) for n in own]

    def _turns(self, row: dict[str, Any]) -> list[int]:
        """The numbers of the assistant's messages; [0] if there are none, which is an error once the row is read."""
        messages = row.get(self.keys["messages_key"])
        given = messages if isinstance(messages, list) else []
        return [n for n, m in enumerate(given) if isinstance(m, dict) and m.get("role") == "assistant"] or [0]

    def segments(self, item: int) -> list[Segment]:
        """Alternately the assistant's input and its answers, cut from the rendered conversation.

        The text up to each turn must be a prefix of the full text. A template that renders a turn differently once
        others follow (some drop earlier thoughts) is refused.
        """
        messages = self.chat(item, self.keys["messages_key"], "data.multiturn.messages_key")
        if all(message["role"] != "assistant" for message in messages):
            raise self.error(item, "no message has the role 'assistant': nothing can be learned from it. Drop the row.")
        settings = self._row_settings(item)
        if self.keys["row_per_turn"]:
            return self._last_turn(item, messages[: self.rows[item][TURN] + 1], settings)
        full = self.render(item, messages, **settings)
        pieces: list[Segment] = []
        done = 0  # characters of `full` that are in `pieces`
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # What the turn is generated from, and the text that ends with it.
            before = self.render(item, messages[:number], add_generation_prompt=True, **settings) if number else ""
            after = self.render(item, messages[: number + 1], **settings)
            bare = before if after.startswith(before) else self.render(item, messages[:number], **settings)
            if bare != before and after.startswith(bare):  # the generation prompt is what differs
                begun = before[max(len(bare), len(os.path.commonprefix([before, after]))) :]
                what = f"which its text of message {number} does not have there: what is learned would not be what"
                remedy = "Set data.multiturn.row_per_turn=true if the contents have reasoning that ends with </think>"
                raise self._prompt_error(item, begun, f"{what} the model has to generate", remedy)
            if not (full.startswith(after) and after.startswith(before) and done <= len(before)):
                each = "data.multiturn.row_per_turn=true, or " if after.startswith(before) else ""
                raise self.error(
                    item,
                    f"the chat template writes message {number} differently once other messages follow, so that the "
                    f"assistant's tokens cannot be identified. Set {each}data.chat_template to one that does not.",
                )
            pieces += [(full[done : len(before)], False), (full[len(before) : len(after)], True)]
            done = len(after)
        return [*pieces, (full[done:], False)] if full[done:] else pieces

    def _last_turn(self, item: int, messages: list[dict[str, Any]], settings: dict[str, Any]) -> list[Segment]:
        """The prompt of the last message and, as what is learned, that message.

        Where the prompt begins a thought that the template leaves out of the text, the message's own content follows:
        the rest of the thought, </think>, the answer. After a prompt that ends a thought, the template's text does.
        """
        number = len(messages) - 1
        before = self.render(item, messages[:-1], add_generation_prompt=True, **settings) if number else ""
        after = self.render(item, messages, **settings)
        if after.startswith(before):
            return [(before, False), (after[len(before) :], True)]
        if (closed := re.search(r"(<think>\s*)?</think>\s*$", before)) and after.startswith(before[: closed.start()]):
            return [(before, False), (after[closed.start() :], True)]
        begun = re.search(r"<think>\s*$", before)
        shown = after[begun.start() :] if begun and after.startswith(before[: begun.start()]) else ""
        if not shown:
            what = f"the chat template's text up to message {number} is not its prompt for that, {before[-40:]!r}, and"
            rule = "what is learned would not be what the model has to generate. Set data.chat_template."
            raise self.error(item, f"{what} what follows: {rule}")
        return [(before, False), (self._rest_of_thought(item, messages, begun[0], shown), True)]

    def _rest_of_thought(self, item: int, messages: list[dict[str, Any]], begun: str, shown: str) -> str:
        """What the last message adds to a prompt that ends with `begun`, the beginning of a thought, where the template
        writes the answer alone (`shown`): the rest of the thought, </think>, the answer, and the end of the turn.
        """
        thought, ended, answer = str(messages[-1]["content"]).partition("</think>")
        answer_and_end = shown.lstrip()
        if answer_and_end.startswith(str(messages[-1]["content"]).strip()):  # the template writes the thought, too
            answer_and_end = answer_and_end.partition("</think>")[2].lstrip()
        if not (ended and answer.strip() and answer_and_end.startswith(answer.strip())):
            what = f"but the content of message {len(messages) - 1} has no reasoning that ends with </think>, and an"
            raise self._prompt_error(item, begun, f"{what} answer after it", "Write it into the content")
        space = answer[: len(answer) - len(answer.lstrip())]
        return thought.removeprefix(begun).removeprefix("<think>") + "</think>" + space + answer_and_end

    def _prompt_error(self, item: int, begun: str, what: str, remedy: str) -> DatasetError:
        """An error about a generation prompt that ends with `begun`, which the row's turn does not fit."""
        text = f"the chat template's generation prompt ends with {begun!r}, {what}. {remedy}, or set data.chat_template"
        others = "to one without it, or a key of data.apply_chat_template_kwargs that turns it off."
        return self.error(item, f"{text} {others}")

    def _row_settings(self, item: int) -> dict[str, Any]:
        """Template settings of the row itself."""
        row, settings = self.rows[item], {}
        if (tools := row.get(self.keys["tools_key"])) is not None:
            settings["tools"] = json.loads(tools) if isinstance(tools, str) else self.plain(item, tools)
        if (thinking := row.get(self.keys["enable_thinking_key"])) is not None:
            settings["enable_thinking"] = thinking
        return settings
