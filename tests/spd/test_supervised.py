"""Labels of single mismatches by hand, and a scorer fitted to them through the command."""

import json
import random
from pathlib import Path

import pytest
import torch

import train_spd_scorer as entry
from recipe.spd.labels import given_labels, label_blocks
from recipe.spd.rollout.client import CompletionCounts
from recipe.spd.rollout.store import Completion
from recipe.spd.supervised import SampledShares, _settings
from spd_scorer import AutoModelForSPDScoring, SPDInputData
from tests.spd.test_spd_rollout import ANSWER, IS, TOKENIZER, AnsweringServer

# Two mismatches each, at positions 0 and 2; the answer is right after an even id, which the last token of a hybrid is.
BLOCKS = {
    "harmless": ([30, 31, 32], [11, 12, 13], [21, 12, 24, 26]),  # 24 after one accept, 26 after both: right
    "second": ([30, 31, 32], [11, 12, 13], [21, 12, 22, 27]),
    "first": ([30, 31, 32], [11, 12, 13], [20, 12, 25, 26]),
    "wrong baseline": ([30, 31, 33], [11, 12, 13], [21, 12, 24, 26]),
}


def infos(*names):
    return [
        {"context_ids": c, "draft_ids": d, "target_ids": t, "ground_truth": "4", "is_correct_baseline": 1}
        for c, d, t in (BLOCKS[name] for name in names)
    ]


def written(folder, name, blocks):
    """Files of blocks {question id: (context, draft, target)} and of their metadata, baselines right; both paths."""
    columns = ("context_ids", "draft_ids", "target_ids")
    known = {"question": "q", "ground_truth": "4", "is_correct_baseline": 1}
    rows = [{"question_id": key, **dict(zip(columns, block, strict=True))} for key, block in blocks.items()]
    metadata = [{"question_id": key, **known} for key in blocks]
    paths = [folder / f"{name}.jsonl", folder / f"{name}_meta.jsonl"]
    for path, lines in zip(paths, (rows, metadata), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(path) for path in paths]


class Completing:
    """Answers as AnsweringServer does; counts the distinct contexts."""

    def __init__(self, lost=()):
        self.asked, self.lost = set(), lost

    def complete(self, requests, title):
        self.asked |= {ids for ids, _ in requests}
        done = {r: Completion((ANSWER, IS, 5 + 4 + r[0][-1] % 2), False) for r in requests if r[0] not in self.lost}
        return done, CompletionCounts()


def test_labels_end_with_the_first_harmful_mismatch():
    completer = Completing()
    labels, tried, used = label_blocks(infos(*BLOCKS), completer, TOKENIZER, {2}, 16)
    assert tried == 4
    assert labels == {0: [True, True], 1: [True, False], 2: [False]}
    # Two baselines, hybrids after one mismatch (ending in 24, 22, 25, and 24 after the other context) and after two.
    assert used == len(completer.asked) == 8
    lost = (30, 31, 32, 11, 12, 13, 27)
    assert label_blocks(infos("second"), Completing([lost]), TOKENIZER, {2}, 16)[0] == {0: [True]}


@pytest.mark.parametrize("budget", range(2, 9))
def test_a_budget_that_covers_no_further_pass_is_spent_block_by_block(budget):
    """First mismatches cost 2, 1 and 1 completions (baseline and hybrid), a wrong baseline 2; second ones 1 each."""
    completer = Completing()
    labels, tried, used = label_blocks(infos(*BLOCKS), completer, TOKENIZER, {2}, 16, budget=budget)
    assert tried == {2: 1, 3: 2, 4: 3, 5: 3}.get(budget, 4)
    expected = {2: {0: [True]}, 3: {0: [True], 1: [True]}}
    expected |= dict.fromkeys((4, 6), {0: [True], 1: [True], 2: [False]})
    assert used == len(completer.asked) <= budget
    if budget in expected:
        assert used == budget and labels == expected[budget]
    if budget in (7, 8):
        assert used == budget and labels == {0: [True, True], 1: [True, False][: budget - 6], 2: [False]}


def test_the_supervised_training_checks_its_settings_first(tiny_llama, tmp_path, capsys, monkeypatch):
    blocks, metadata = written(tmp_path, "train", {"a": BLOCKS["first"]})
    options = ["--supervised", "--blocks", blocks, "--metadata", metadata, "--model", tiny_llama,
               "--output-dir", str(tmp_path / "run"), "trainer.device=cpu", "data.train_batch_size=1"]
    monkeypatch.setattr("recipe.spd.supervised.train_supervised", lambda *_: pytest.fail("trains"))
    with pytest.raises(SystemExit, match="did you mean spd.rollout.max_tokens"):
        entry.main([*options, "spd.rollout.max_tokenz=5"])
    assert entry.main([*options, "spd.rollout.max_tokenz=5", "trainer.dry_run=true"]) == 1
    assert "did you mean spd.rollout.max_tokens" in capsys.readouterr().out


def test_batches_are_one_sequence_of_samples_over_the_epochs():
    shares, order = SampledShares(10, 4, rank=0, ranks=1, seed=3), random.Random(3)
    batches = []
    for shares.epoch in range(2):
        batches += list(shares)
    assert len(shares) == 3 and batches == [order.sample(range(10), 4) for _ in range(6)]
    later = SampledShares(10, 4, rank=1, ranks=2, seed=3)  # a resumed run on two ranks
    later.epoch = 1
    assert list(later) == [batch[1::2] for batch in batches[3:]]


@pytest.mark.process
@pytest.mark.parametrize("contradicted", [False, True])
def test_the_command_fits_a_scorer_and_keeps_the_weights_that_are_best_in_validation(
    tiny_llama, tmp_path, monkeypatch, capsys, contradicted
):
    monkeypatch.setattr("recipe.spd.supervised.FEW_LABELS", 6 if contradicted else 5)
    names = [*BLOCKS][:3]
    blocks, metadata = written(tmp_path, "train", {name: BLOCKS[name] for name in names})
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    options = [
        "--blocks", blocks, "--metadata", metadata, "--model", tiny_llama,
        "--tokenizer", str(tmp_path / "tokenizer"), "--output-dir", str(tmp_path / "run"), "trainer.device=cpu",
        "spd.rollout.max_tokens=16", "data.train_batch_size=3", "trainer.total_training_steps=40",
        "spd.rollout.served_model=served",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",  # in which the saved scorer is loaded
    ]  # fmt: skip
    if contradicted:  # harmful after 21 and harmless after 20, as no training block is
        targets = {"v": [21, 12, 25, 26], "w": [20, 12, 24, 26]}
        held = {name: ([30, 31, 32], [11, 12, 13], ids) for name, ids in targets.items()}
        held["x"] = BLOCKS["wrong baseline"]  # no label
        val_blocks, val_metadata = written(tmp_path, "val", held)
        options += ["--val-blocks", val_blocks, "--val-metadata", val_metadata]
    server = AnsweringServer()
    with server.running() as url:
        monkeypatch.setenv("SPD_VLLM_URLS", url)
        assert entry.main([*options, "--supervised", "--patience", "12"]) == 0
    folder = tmp_path / "run" / "supervised"
    figures = json.loads((folder / "supervised.json").read_text())
    assert figures["blocks"] == 3 and figures["blocks_below_half"] == 2
    assert figures["loss"][-1] < 0.5 * figures["loss"][0]
    if contradicted:
        validation = {int(step): loss for step, loss in figures["validation"].items()}  # an epoch has one step
        last = figures["saved_step"] + 12  # epochs of patience
        assert list(validation) == list(range(1, last + 1)) and len(figures["loss"]) == figures["steps"] == last < 40
        assert figures["saved_step"] == min(validation, key=validation.get)
        logged = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert logged[-1]["spd/unlabelled_val_blocks"] == pytest.approx(1 / 3)
        assert validation[last] > 1.1 * validation[figures["saved_step"]]
        scorer = AutoModelForSPDScoring.from_pretrained(folder)
        columns = zip(*held.values(), strict=True)
        z = scorer(**SPDInputData.from_blocks(*columns, sep_token_id=3, pad_token_id=0).as_kwargs()).detach()
        truth = torch.tensor([0.0, 1.0, 1.0])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z[[0, 1, 1], [0, 0, 2]], truth).item()
        assert loss == pytest.approx(validation[figures["saved_step"]], rel=1e-4)
        shown = capsys.readouterr().err
        assert "the scorer memorises its 3 blocks" in shown and "Labels of mismatch 2" in shown
        assert "5 labels on 3 blocks, 2 of which have one below 1/2; 3 of 3 blocks were tried, by 6 compl" in shown
        assert shown.count("5 labels are too few to train a scorer") == 2  # before the training, and at the end
        before = (folder / "supervised.json").read_text()
        with server.running() as url:  # a run that has ended, started again
            monkeypatch.setenv("SPD_VLLM_URLS", url)
            assert entry.main([*options, "--supervised", "--patience", "12"]) == 0
        assert (folder / "supervised.json").read_text() == before
        return
    assert figures["completions"] == len(server.asked) and figures["validation"] == {}
    assert "too few" not in capsys.readouterr().err
    scorer = AutoModelForSPDScoring.from_pretrained(folder)
    columns = zip(*(BLOCKS[name] for name in names), strict=True)
    z = scorer(**SPDInputData.from_blocks(*columns, sep_token_id=3, pad_token_id=0).as_kwargs())
    assert z[0, 2] > 0 > z[1, 2] and z[0, 0] > 0 > z[2, 0]  # the same draft tokens, distinguished by the target's
    with pytest.raises(SystemExit):
        entry.parse_args([*options, "--label-budget", "3"])


def test_labels_of_the_data_need_no_server(tiny_llama, tmp_path):
    """A budget takes the first blocks up to the one whose labels exceed it; a label between 0 and 1 is a share."""
    given = [{"labels": [1.0]}, {"labels": None}, {"labels": [0.0, 1.0]}, {"labels": [0.25]}]
    assert given_labels(given, None) == {0: [1.0], 2: [0.0, 1.0], 3: [0.25]}
    assert given_labels(given, 2) == {0: [1.0]} and given_labels(given, 3) == {0: [1.0], 2: [0.0, 1.0]}
    blocks, metadata = written(tmp_path, "train", {name: BLOCKS[name] for name in ("harmless", "first")})
    lines = [json.loads(line) | {"labels": label} for line, label in
             zip(Path(blocks).read_text().splitlines(), ([1, 1], [0]), strict=True)]  # fmt: skip
    Path(blocks).write_text("".join(json.dumps(line) + "\n" for line in lines))
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    options = [
        "--blocks", blocks, "--metadata", metadata, "--model", tiny_llama, "--tokenizer",
        str(tmp_path / "tokenizer"), "--output-dir", str(tmp_path / "run"), "trainer.device=cpu", "--supervised",
        "data.train_batch_size=2", "trainer.total_training_steps=20",
    ]  # fmt: skip
    code = entry.main(options)
    figures = json.loads((tmp_path / "run" / "supervised" / "supervised.json").read_text())
    assert code == 0 and figures["completions"] == 0 and figures["blocks"] == 2 and figures["blocks_below_half"] == 1
    assert figures["loss"][-1] < 0.5 * figures["loss"][0]
    rows = Path(blocks).read_text().splitlines()
    Path(blocks).write_text(rows[0] + "\n" + rows[0].replace("harmless", "first") + "\n")  # two labels each
    with pytest.raises(ValueError, match="train.parquet: no block got a label within --label-budget 1, .* Raise the"):
        entry.main([*options, "--label-budget", "1"])


def test_a_micro_batch_has_the_blocks_of_grpos_samples_on_a_rank():
    actor = "actor_rollout_ref.actor."
    config, _ = entry.compose_config([
        "data.train_files=a", "data.val_files=a", "actor_rollout_ref.model.path=m", "trainer.default_local_dir=d",
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n=8", f"{actor}use_dynamic_bsz=false",
        f"{actor}ppo_micro_batch_size_per_gpu=null", f"{actor}ppo_micro_batch_size=48",
    ])  # fmt: skip
    assert _settings(config, blocks=5).data.micro_batch_size_per_gpu == 3  # 48 samples on 2 ranks, 8 of a block
