"""Samples as rows of text and scores, for dumps and for the report."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.data.chat_template import answer_text
from verl.protocol import DataProto
from verl.reward.rows import EXTRAS
from verl.utils.jsonl import replace_text

SAMPLES_OF_A_KIND = 2


def sample_rows(
    samples: DataProto, tokenizer: Any, scores: Sequence[float], extras: Mapping[str, Sequence[Any]], step: int
) -> list[dict[str, Any]]:
    """One row per sample: input, output, gts, score, step, and the reward's extras; one with such a name but score is
    written as <name>_extra.

    Reads prompts [B, P], responses [B, R] and attention_mask [B, P+R]. A rollout whose responses are not tokens puts
    their text into the column `response_text`: a string, or a list of segments with a `text` each.
    """
    columns = samples.non_tensor_batch
    prompts = [answer_text(tokenizer, ids) for ids in samples.batch["prompts"].tolist()]
    if "response_text" in columns:
        outputs = [
            text if isinstance(text, str) else " ".join(segment["text"] for segment in text)
            for text in columns["response_text"]
        ]
    else:
        mask = samples.batch["attention_mask"][:, -samples.batch["responses"].size(1) :].bool()
        responses = zip(samples.batch["responses"], mask, strict=True)
        outputs = [answer_text(tokenizer, ids[kept].tolist()) for ids, kept in responses]
    judged = columns["reward_model"] if "reward_model" in columns else [{}] * len(samples)
    rows = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        truth = judged[i].get("ground_truth")
        row = {"input": prompt, "output": output, "gts": truth, "score": scores[i], "step": step}
        for key, values in extras.items():
            if key != "score":
                row[f"{key}_extra" if key in row else key] = values[i]
        rows.append(row)
    return rows


def report_rows(
    rows: Sequence[Mapping[str, Any]], samples: DataProto, extra_keys: Sequence[str], tokenizer: Any
) -> list[dict]:
    """`sample_rows` of `samples` as the report reads them: prompt, response, segments, score, ground_truth, extras.

    Conversations of several turns (column __num_turns__) have segments of generated text and text that was given.
    """
    columns = samples.non_tensor_batch
    texts = list(columns["response_text"]) if "response_text" in columns else [""] * len(rows)
    if "__num_turns__" in columns:
        for i in np.flatnonzero(columns["__num_turns__"] > 2):
            texts[i] = _turns(samples, i, tokenizer)
    reported = []
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        extras = {key: columns[EXTRAS][i].get(key) for key in extra_keys}
        reported.append({
            "prompt": row["input"], "response": row["output"], "segments": None if isinstance(text, str) else text,
            "score": row["score"], "ground_truth": row["gts"], "extras": extras,
        })
    return reported


def _turns(samples: DataProto, row: int, tokenizer: Any) -> list[dict[str, str]]:
    """The response of a row as {text, kind}, kind "generated" or "given"."""
    responses, mask = samples.batch["responses"][row], samples.batch["response_mask"][row]
    length = int(samples.batch["attention_mask"][row, -len(responses) :].sum())
    marked = zip(responses[:length].tolist(), mask[:length].tolist(), strict=True)
    return [
        {"text": tokenizer.decode([token for token, _ in turn]), "kind": "generated" if counts else "given"}
        for counts, turn in itertools.groupby(marked, key=lambda pair: bool(pair[1]))
    ]


def pick_samples(rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The best, the worst and some random rows by `score`, each text once, with their `kind`."""
    texts = {(row["prompt"], row["response"]): i for i, row in reversed(list(enumerate(rows)))}
    order = sorted(texts.values(), key=lambda i: (-rows[i]["score"], i))
    best = order[:SAMPLES_OF_A_KIND]
    worst = [i for i in order[::-1][:SAMPLES_OF_A_KIND] if i not in best]
    rest = [i for i in order if i not in best and i not in worst]
    random = np.random.default_rng(seed).permutation(rest)[:SAMPLES_OF_A_KIND].astype(int).tolist()
    kinds = {"best": best, "worst": worst, "random": random}
    return [{"kind": kind, **rows[i]} for kind, picked in kinds.items() for i in picked]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by these rows, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False, default=json_value) + "\n" for row in rows))


def json_value(value: Any) -> Any:
    """What json cannot write: numpy scalars as numbers, arrays as lists, anything else (tensors, objects) as text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
