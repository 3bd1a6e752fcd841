"""prepare_blocks on a tiny pair: vLLM and Ray give the plain loop's files, a killed command resumes; prompts."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from examples.spd_arithmetic import corpus, hf_tasks, prepare_blocks, questions
from examples.spd_arithmetic.blocks import DraftedBlock, drawn_offsets
from examples.spd_arithmetic.model import Shape, SmallLlama, export
from examples.spd_arithmetic.pair import PairFiles
from examples.spd_arithmetic.questions import PromptStyle
from examples.spd_arithmetic.tokenizer import Encoder, build_tokenizer
from tests.helpers.models import make_tokenizer
from tests.helpers.watched_runs import wait_until
from verl.utils.accelerator import default_dtype

ROOT = Path(__file__).parents[2]
FILES = ("blocks_train.parquet", "blocks_val.parquet", "metadata_train.parquet", "metadata_val.parquet")
LINES = (*(f"questions_{split}.jsonl" for split in questions.SPLITS), "harm_labels.jsonl", "harm_labels_val.jsonl")


def write_questions(path, problems):
    rows = [{"question": corpus.question_text(p), "answer": f"#### {corpus.solve(p)}"} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments of a small preparation: a pair that agrees now and then, thirty questions in official splits."""
    root = tmp_path_factory.mktemp("prepare")
    shape = Shape(len(Encoder().tokens), dim=32, layers=1, heads=1, ff=32)
    for name in ("target", "draft"):
        torch.manual_seed(0)
        model = SmallLlama(shape)
        model.embedding.data.mul_(0.02)  # else an untrained model repeats its input
        if name == "draft":
            for weight in model.parameters():
                weight.data += 0.1 * weight.data.std() * torch.randn_like(weight)
        export(model, root / name)
    rng = random.Random(1)
    problems = list({corpus.question_text(p): p for p in (corpus.sample_problem(rng) for _ in range(60))}.values())
    arguments = ["--target", str(root / "target"), "--draft", str(root / "draft")]
    for split, part in (("train", problems[:20]), ("test", problems[20:30])):
        arguments += [f"--{split}-questions", str(write_questions(root / f"{split}.jsonl", part))]
    return [
        *arguments, "--n-train-questions", "12", "--n-val-questions", "5", "--n-test-questions", "6",
        "--n-train-blocks", "40", "--n-val-blocks", "9", "--n-harm-blocks", "12", "--max-new-tokens", "14",
        "--gamma", "4", "--batch-size", "3", "--drift-margin", "0.02", "--dtype", "float32",
    ]  # fmt: skip


def prepared(out, *arguments, **environment):
    """The folder that the command makes. Its processes are forked, which one with threads of Ray must not do."""
    command = [sys.executable, "-m", "examples.spd_arithmetic.prepare_blocks", "--out", str(out), *arguments]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True)
    return out


@pytest.fixture(scope="module")
def plain(given, tmp_path_factory):
    """What the plain loop makes, in one process."""
    return prepared(tmp_path_factory.mktemp("plain") / "bed", *given, "--processes", "1")


def assert_same(one, other):
    for name in FILES:
        pd.testing.assert_frame_equal(pd.read_parquet(one / name), pd.read_parquet(other / name))
    for name in LINES:
        assert (one / name).read_text() == (other / name).read_text()
    figures, others = (json.loads((folder / "testbed.json").read_text())["figures"] for folder in (one, other))
    assert figures == others


@pytest.mark.process
def test_vllm_gives_the_blocks_of_the_plain_loop(given, plain, tmp_path):
    assert_same(plain, prepared(tmp_path / "bed", *given, "--engine", "vllm", "--processes", "1"))
    blocks = pd.read_parquet(plain / "blocks_train.parquet")
    drifted = blocks.block_id.str.contains("/drifted/")
    assert drifted.sum() == 20 and blocks.draft_ids[~drifted].map(tuple).nunique() > 5
    wrong = [sum(d != t for d, t in zip(b.draft_ids, b.target_ids, strict=False)) for b in blocks.itertuples()]
    assert min(wrong) == 1 and max(wrong) > 1  # some agreement, and drafts that go on behind a mismatch


@pytest.mark.process
def test_ray_actors_give_the_same_files(given, plain, tmp_path, ray_cluster):
    address = ray_cluster.get_runtime_context().gcs_address
    made = prepared(tmp_path / "bed", *given, "--ray", "--processes", "2", RAY_ADDRESS=address)
    assert_same(plain, made)


@pytest.mark.process
def test_a_killed_command_goes_on_and_ends_with_the_same_files(given, plain, tmp_path):
    out = tmp_path / "bed"
    command = [sys.executable, "-m", "examples.spd_arithmetic.prepare_blocks", "--out", str(out), *given]
    kept = tmp_path / "bed.partial" / prepare_blocks.KEPT
    with open(tmp_path / "log", "w") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: any(kept.glob("*/*.json")), first, tmp_path / "log")
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert list(kept.glob("*/*.json")) and not out.exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "parts are there from an earlier run" in again.stdout + again.stderr
    assert_same(plain, out)
    assert not kept.exists()


def test_official_splits_are_kept_and_validation_comes_from_train(tmp_path):
    rng = random.Random(0)
    problems = [corpus.sample_problem(rng) for _ in range(30)]
    files = {"train": write_questions(tmp_path / "train", problems[:20]), "val": None,
             "test": write_questions(tmp_path / "test", problems[20:])}  # fmt: skip
    counts, tokenizer = {"train": 9, "val": 4, "test": 5}, build_tokenizer()
    splits = questions.read_splits(files, counts, 0, tokenizer, PromptStyle())
    assert {name: len(rows) for name, rows in splits.items()} == counts
    texts = {name: {q.question for q in rows} for name, rows in splits.items()}
    train, test = ({corpus.question_text(p) for p in part} for part in (problems[:20], problems[20:]))
    assert texts["train"] | texts["val"] <= train and not texts["train"] & texts["val"] and texts["test"] <= test
    truth = {corpus.question_text(p): str(corpus.solve(p)) for p in problems}
    assert all(q.ground_truth == truth[q.question] for rows in splits.values() for q in rows)
    files["val"] = write_questions(tmp_path / "val", problems[18:22])
    with pytest.raises(ValueError, match="train and .*val share 2 questions"):
        questions.read_splits(files, counts, 0, tokenizer, PromptStyle())
    files["val"] = None
    with pytest.raises(ValueError, match="test has 10 distinct questions, but 11 are requested"):
        questions.read_splits(files, {**counts, "test": 11}, 0, tokenizer, PromptStyle())


TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }} : {{ m['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}z {% if enable_thinking is defined and not enable_thinking %}x y {% endif %}"
    "{{ style | default('') }}{% endif %}"
)


def test_prompts_follow_template_system_shots_and_thinking(tmp_path):
    tokenizer, shots = make_tokenizer(), tmp_path / "shots.jsonl"
    shots.write_text('{"question": "1 + 1", "answer": "b #### 2"}\n')
    tokenizer.chat_template = TEMPLATE

    def text(**settings):
        (ids,) = PromptStyle(instruction="c", **settings).prompts(["2 + 3"], tokenizer)
        return tokenizer.decode(ids)

    assert text() == "u : 2 + 3 c . z"
    assert text(thinking=True) == "u : 2 + 3 c . z" and text(thinking=False) == "u : 2 + 3 c . z x y"
    assert text(system="d", template_args={"style": "e"}) == "s : d . u : 2 + 3 c . z e"
    assert text(few_shot=shots) == "u : 1 + 1 c . a : b <unk> 2 . u : 2 + 3 c . z"
    tokenizer.chat_template = None
    assert text(few_shot=shots, system="d") == "d <unk> 1 + 1 c <unk> b <unk> 2 <unk> 2 + 3 c <unk>"
    with pytest.raises(ValueError, match="has no chat template, which .'enable_thinking'. are for; leave out"):
        text(thinking=False)


def test_answers_after_mismatches_are_compared_with_the_own_ones_to_the_same_questions():
    def blocks(**right):
        return [DraftedBlock("", q, [], [], [], r, 0, 0) for q, values in right.items() for r in values]

    own = {"a": True, "b": False, "c": True, "d": True, "unused": False}
    after, before, drop, error = prepare_blocks.drop_after_mismatches(
        blocks(a=[True, False], b=[False], c=[True], d=[True, True]), own
    )
    assert (after, before, drop) == (0.625, 0.75, 0.125)
    assert error == pytest.approx((4 * 0.125**2 * 3 / 12) ** 0.5)  # differences 0.5, 0, 0, 0: variance 3/48
    same = prepare_blocks.drop_after_mismatches(blocks(a=[True], b=[False]), own)
    assert same == (0.5, 0.5, 0.0, 0.0)  # half of the answers are wrong, as before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--train-questions", "a"], "go together"), (["--val-questions", "a"], "and --val-questions with them"),
        (["--train-questions", "a", "--test-questions", "b", "--draft", "d"], "go together"),
        (["--train-questions", "a", "--test-questions", "b", "--target", "t", "--draft", "d", "--softness", "0"],
         "--softness is for models trained"),
        (["--tensor-parallel", "2"], "needs --engine vllm"),
        (["--device", "cuda", "--no-ray"], "--no-ray is for a CPU"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(changes, message, capsys):
    with pytest.raises(SystemExit):
        prepare_blocks.parse_arguments(["--out", "o", *changes])
    assert message in capsys.readouterr().err


def test_changed_code_of_the_decoder_makes_a_new_test_bed():
    code = {module.__name__: Path(module.__file__).read_text() for module in prepare_blocks.CODE_ELSEWHERE}
    of_decoder = re.findall(r"^from (verl\.models\.\w+) import", code["recipe.spd.rollout.decoder"], re.M)
    assert of_decoder and {*of_decoder, "recipe.spd.rollout.answers"} <= code.keys()


def test_half_of_the_offsets_are_0_and_the_others_are_drawn_evenly_from_the_seed():
    drawn = drawn_offsets(9000, 8, 0)
    assert drawn == drawn_offsets(9000, 8, 0) != drawn_offsets(9000, 8, 1)
    assert 4300 < drawn.count(0) < 4700 and all(480 < drawn.count(offset) < 650 for offset in range(1, 9))
    assert drawn_offsets(3, 0, 0) == [0, 0, 0]


def test_both_models_have_the_dtype_that_is_asked_for_or_the_cpus(given, tmp_path):
    assert prepare_blocks.parse_arguments(["--out", str(tmp_path)]).dtype == default_dtype("cpu")
    files = PairFiles(Path(given[1]).parent, "cpu", 1, 4, max_new_tokens=8, batch_size=2, dtype="bfloat16")
    models = hf_tasks._load(files)
    assert [models[name].dtype for name in ("target", "draft")] == [torch.bfloat16, torch.bfloat16]
