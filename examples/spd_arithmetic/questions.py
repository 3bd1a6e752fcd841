"""Questions of a test bed, split three ways: drawn from the corpus, or read from files in GSM8K's format."""

import itertools
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from examples.spd_arithmetic import corpus
from recipe.spd.rollout.answers import final_answer, is_correct
from verl.data.chat_template import render_chat
from verl.utils.jsonl import read_objects

SPLITS = ("train", "val", "test")
INSTRUCTION = "Reason step by step, then finish with 'the answer is' and the number."


@dataclass(frozen=True)
class Question:
    """One question as the models see it."""

    question_id: str
    question: str
    prompt_ids: list[int]
    ground_truth: str


Splits = dict[str, list[Question]]


def is_right(ids: Sequence[int], truth: str, decode: Callable[[Sequence[int]], str], ends: Collection[int]) -> bool:
    """Whether an answer (token ids) has ended and names the right number; one cut at the limit is wrong."""
    return bool(ids) and ids[-1] in ends and is_correct(decode(ids), truth)


@dataclass(frozen=True)
class PromptStyle:
    """How a question becomes a prompt: by the tokenizer's chat template, else as plain "Question: ... Answer:"."""

    instruction: str = INSTRUCTION  # follows each question
    system: str | None = None  # the first message
    few_shot: Path | None = None  # file of worked examples
    thinking: bool | None = None  # the template's enable_thinking; None: its default
    template_args: dict[str, Any] = field(default_factory=dict)

    def prompts(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Token ids of the prompt of each question."""
        shots = [(text, answer) for text, answer, _ in _worked(self.few_shot)] if self.few_shot else []
        settings = {**self.template_args, **({} if self.thinking is None else {"enable_thinking": self.thinking})}
        if tokenizer.chat_template is None and settings:
            raise ValueError(f"{tokenizer.name_or_path} has no chat template, which {sorted(settings)} are for; leave "
                             "out --thinking and --template-args")
        return [self._prompt(text, shots, settings, tokenizer) for text in texts]

    def _prompt(self, text: str, shots: list[tuple[str, str]], settings: dict[str, Any], tokenizer: Any) -> list[int]:
        if tokenizer.chat_template is None:
            turns = [f"Question: {q}\n{self.instruction}\nAnswer: {a}\n\n" for q, a in shots]
            turns.append(f"Question: {text}\n{self.instruction}\nAnswer:")
            return tokenizer((f"{self.system}\n\n" if self.system else "") + "".join(turns))["input_ids"]
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in [*shots, (text, None)]:
            messages.append({"role": "user", "content": f"{question}\n{self.instruction}".rstrip()})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        prompt = render_chat(tokenizer, messages, **{"add_generation_prompt": True, **settings})
        return tokenizer(prompt, add_special_tokens=False)["input_ids"]


def draw_questions(counts: dict[str, int], seed: int, tokenizer: PreTrainedTokenizerBase) -> Splits:
    """Word problems of the corpus; no text occurs twice, within or across the splits."""
    rng = random.Random(f"questions/{seed}")
    truth: dict[str, str] = {}
    while len(truth) < sum(counts.values()):
        problem = corpus.sample_problem(rng)
        truth[corpus.question_text(problem)] = str(corpus.solve(problem))
    texts = list(truth)
    return _split(texts, [truth[t] for t in texts], [tokenizer(t)["input_ids"] for t in texts], counts)


def read_splits(
    files: dict[str, Path | None], counts: dict[str, int], seed: int, tokenizer: PreTrainedTokenizerBase,
    style: PromptStyle,
) -> Splits:  # fmt: skip
    """Questions of a jsonl file for each split, with `question` and `answer` ("... #### 42"), in an order that the seed
    fixes; without a file of their own, validation questions are taken from the train file. A question that two files
    hold is a ValueError.
    """
    read = {split: _read(path) for split, path in files.items() if path is not None}
    for one, other in itertools.combinations(read, 2):
        if both := read[one].keys() & read[other].keys():
            raise ValueError(f"{files[one]} and {files[other]} share {len(both)} questions, such as "
                             f"{min(both)[:80]!r}; remove them from one")
    texts: list[str] = []
    for split, path in files.items():
        if path is None:
            continue
        taken = {s: counts[s] for s in SPLITS if s == split or (split == "train" and s == "val" and s not in read)}
        if len(read[split]) < sum(taken.values()):
            raise ValueError(
                f"{path} has {len(read[split])} distinct questions, but {sum(taken.values())} are requested ({taken}); "
                "lower --n-train-questions, --n-val-questions or --n-test-questions"
            )
        texts += random.Random(seed).sample(sorted(read[split]), sum(taken.values()))
    truth = {text: answer for rows in read.values() for text, answer in rows.items()}
    return _split(texts, [truth[t] for t in texts], style.prompts(texts, tokenizer), counts)


def _read(path: Path) -> dict[str, str]:
    """Question -> the number that its answer ends with."""
    return {text: answer for text, _, answer in _worked(path)}


def _worked(path: Path) -> Iterator[tuple[str, str, str]]:
    """(question, its worked answer, the number at the end of that) of each line."""
    for number, row in read_objects(path):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(f"{path}, line {number}: keys {sorted(row)}; expected question and answer (GSM8K format)")
        answer = final_answer(row["answer"])
        if answer is None:
            raise ValueError(f"{path}, line {number}: no answer in {row['answer'][-60:]!r}; end it with '#### 42'")
        yield row["question"].strip(), row["answer"].strip(), answer


def _split(texts: list[str], truth: list[str], prompts: list[list[int]], counts: dict[str, int]) -> Splits:
    rows = zip(texts, prompts, truth, strict=True)
    return {
        split: [Question(f"{split}-{i}", *row) for i, row in enumerate(itertools.islice(rows, counts[split]))]
        for split in SPLITS
    }


def write_questions(path: Path, questions: list[Question]) -> None:
    """One JSON line a question."""
    path.write_text("".join(json.dumps(asdict(q)) + "\n" for q in questions))
