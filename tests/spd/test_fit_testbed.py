"""The five numbers that the fit of the test bed compares.

Not covered: the test beds themselves (test_testbed.py), and whether a combination is close to a real pair.
"""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.spd_arithmetic import fit_testbed
from tests.helpers.models import save_tiny_llama

CONTEXT, DRAFTS = [5, 6, 7], [[8, 9, 10], [11, 12, 13], [14, 15, 16]]
HARMFUL = [{0: False, 2: True}, {1: True}, {0: False, 1: False}]  # by block and position


def test_the_numbers_are_those_of_the_targets_logits(tmp_path):
    save_tiny_llama(tmp_path / "target", seed=0, vocab_size=64)
    save_tiny_llama(tmp_path / "draft", hidden=32, layers=1, seed=1, vocab_size=64)
    rows = [{"block_id": f"b{b}", "position": at, "context_ids": CONTEXT, "draft_ids": DRAFTS[b], "harmful": harmful}
            for b, block in enumerate(HARMFUL) for at, harmful in block.items()]  # fmt: skip
    (tmp_path / "harm_labels_val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    values = {True: [], False: []}
    for block, draft in zip(HARMFUL, DRAFTS, strict=True):
        logits = target(torch.tensor([CONTEXT + draft])).logits[0, len(CONTEXT) - 1 :].double()
        for at, harmful in block.items():
            probabilities = logits[at].softmax(-1)
            entropy = -(probabilities * probabilities.log()).sum()
            margin = logits[at, draft[at]] - logits[at].max()
            values[harmful].append({"margin": margin, "probability": probabilities[draft[at]], "entropy": entropy})
    (tmp_path / "testbed.json").write_text(json.dumps({"figures": {"exact_accepted_per_forward": 4.25}}))
    expected = {"harmless": 3 / 5, "exact": 4.25}
    for name in ("margin", "probability", "entropy"):
        pairs = [(good[name], bad[name]) for good in values[False] for bad in values[True]]
        expected[name] = sum(float(good) > float(bad) for good, bad in pairs) / len(pairs)
    assert fit_testbed.numbers(tmp_path, "float32") == pytest.approx(expected)
    file = tmp_path / "harm_labels_val.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"harmful": false' in line))
    with pytest.raises(ValueError, match="100% of the labelled validation mismatches are harmless.*--n-val-blocks"):
        fit_testbed.numbers(tmp_path, "float32")
