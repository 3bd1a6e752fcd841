"""The test bed's corpus, models and blocks."""

import json
import multiprocessing
import operator
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch

from examples.spd_arithmetic import blocks, corpus, hf_tasks, pair, prepare_blocks, questions, train_models, workers
from examples.spd_arithmetic.model import Shape, SmallLlama, export
from examples.spd_arithmetic.tokenizer import EOS_ID, Encoder, build_tokenizer
from recipe.spd.rollout.decoder import greedy_generate
from tests.helpers.models import make_tokenizer
from tests.helpers.watched_runs import becomes
from tests.spd.test_prepare_blocks import write_questions

RESULTS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
NUMBER = r"(\d+)"
CHANGES = (  # pattern of a sentence, value before -> value after
    (rf"\w+ (?:loses|sells|drops|eats) {NUMBER} \w+", lambda v, n: v - n),
    (r"\w+ (?:loses|sells|drops|eats) half of the \w+", lambda v: v // 2),
    (rf"\w+ (?:buys|finds|wins) {NUMBER} more \w+", lambda v, n: v + n),
    (rf"\w+ gives {NUMBER} \w+ to \w+", lambda v, n: v - n),
    (rf"\w+ gets {NUMBER} \w+ from \w+", lambda v, n: v + n),
)
COMPARES = (
    (rf"\w+ has {NUMBER} more \w+ than \w+", lambda v, n: v + n),
    (rf"\w+ has {NUMBER} fewer \w+ than \w+", lambda v, n: v - n),
    (r"\w+ has twice as many \w+ as \w+", lambda v: 2 * v),
    (r"\w+ has half as many \w+ as \w+", lambda v: v // 2),
)
STARTS = (
    (rf"\w+ has {NUMBER} \w+ and each one holds {NUMBER} \w+", lambda a, b: a * b),
    (rf"\w+ has {NUMBER} \w+ and in total they hold {NUMBER} \w+", lambda a, b: b),
    (rf"\w+ has {NUMBER} red \w+ and {NUMBER} green \w+", lambda a, b: a + b),
)


def read_and_solve(text: str) -> int:
    """Answer a question from its text alone, by patterns of its sentences."""
    *facts, question = re.split(r" \. ", text)

    def first(rules, sentence, *before):
        for pattern, result in rules:
            match = re.fullmatch(pattern, sentence)
            if match:
                return result(*before, *map(int, match.groups()))
        return None

    value, second = first(STARTS, facts[0]), None
    assert value is not None, text
    for sentence in facts[1:]:
        changed = first(CHANGES, sentence, value)
        if changed is None:
            second = first(COMPARES, sentence, value)
            assert second is not None, sentence
        else:
            value = changed
    if question.endswith("together ?"):
        return value + second
    return value if question.endswith("now ?") else second


def drawn(count: int, seed: int = 1) -> list[corpus.Problem]:
    rng = random.Random(seed)
    return [corpus.sample_problem(rng) for _ in range(count)]


def test_answers_are_right_under_every_wording():
    rng = random.Random(2)
    for problem in drawn(400):
        wanted = read_and_solve(corpus.question_text(problem))
        assert wanted == corpus.solve(problem)
        mixed = [corpus.mixed_style(rng) for _ in range(2)]
        for style in (corpus.house_style, *mixed, corpus.draft_style(problem.item, 0.45)):
            words, _ = corpus.render(corpus.answer_slots(problem), style)
            text = " ".join(words)
            assert words[-3:] == ["answer", "is", str(wanted)]
            calculations = re.findall(r"(\d+) ([-+*/]) (\d+) (?:=|makes|is) (\d+)", text)
            for a, sign, b, result in calculations:
                assert int(result) == RESULTS[sign](int(a), int(b)), text
            silent = problem.start.kind == "total"  # its first step has nothing to calculate
            assert len(calculations) == problem.steps - silent
            assert all(0 <= int(n) <= corpus.MAX_NUMBER for n in re.findall(r"\d+", text))


@pytest.mark.parametrize(("share", "near"), [(0.45, 0.07), (0.75, 0.07), (0.975, 0.015)])
def test_the_draft_shares_as_many_wordings_with_the_house_as_asked(share, near):
    slots = {(s.name, p.item): len(s.options) for p in drawn(800) for s in corpus.answer_slots(p) if len(s.options) > 1}
    house = [corpus.draft_style(item, share)(name, n) == 0 for (name, item), n in slots.items()]
    assert sum(house) / len(house) == pytest.approx(share, abs=near) and not all(house)
    # a lower share only adds deviations: it never changes which wording is the favourite
    bare = [corpus.draft_style(item, 0.0)(name, n) for (name, item), n in slots.items()]
    assert 0 not in bare
    chosen = [corpus.draft_style(item, share)(name, n) for (name, item), n in slots.items()]
    assert all(ours in (0, favourite) for ours, favourite in zip(chosen, bare, strict=True))


def test_mask_marks_exactly_the_first_token_that_leaves_house_wording():
    slots = [
        corpus.Slot("a", ("first ,", "at first ,")),
        corpus.Slot("b", (", so", ", that is")),
        corpus.Slot("c", ("of them", "of")),
        corpus.Slot("d", ("7",)),
    ]
    words, leaves = corpus.render(slots, lambda name, n: n - 1)
    assert words == "at first , , that is of 7".split()
    assert [w for w, leave in zip(words, leaves, strict=True) if leave] == ["at", "that", "7"]
    assert [leave for leave in leaves if leave] == ["a/1", "b/1", "c/1"]  # "7" leaves c's wording, which ended early
    assert corpus.render(slots, corpus.house_style)[1] == [""] * 7


@pytest.mark.parametrize(("softness", "draft_softness"), [(0.0, 0.0), (1.0, 1.0), (0.3, 0.3), (0.5, 0.1), (0.0, 0.4)])
def test_softness_is_the_share_of_leaving_tokens_that_count(softness, draft_softness, monkeypatch):
    monkeypatch.setattr(train_models, "TARGET_DRILL_SHARE", 0.0)
    monkeypatch.setattr(corpus, "mixed_style", lambda rng: lambda name, n: n - 1)
    leaving, counted = Counter(), Counter()
    for seed in range(120):
        ids, labels = train_models.target_row(random.Random(seed), Encoder(), softness, draft_softness)
        rng = random.Random(seed)
        rng.random()  # the choice between drill and problem
        problem = corpus.sample_problem(rng)
        prompt = len(corpus.question_text(problem).split())
        slots, favourite = corpus.answer_slots(problem), corpus.draft_style(problem.item, 0.0)
        marks = corpus.render(slots, lambda name, n: n - 1)[1]
        options = {s.name: len(s.options) for s in slots}
        drafts = {f"{name}/{n - 1}": favourite(name, n) == n - 1 for name, n in options.items()}
        assert labels[:prompt] == [-100] * prompt and ids[-1] == labels[-1] == EOS_ID
        for token, label, mark in zip(ids[prompt:-1], labels[prompt:-1], marks, strict=True):
            assert label == token or (mark and label == -100)
            if mark:
                leaving[drafts[mark]] += 1
                counted[drafts[mark]] += label == token
    assert counted[False] / leaving[False] == pytest.approx(softness, abs=0.06)
    assert counted[True] / leaving[True] == pytest.approx(draft_softness, abs=0.06)


def test_drill_counts_only_right_results():
    ids, labels = train_models.drill_row(random.Random(0), Encoder())
    text = Encoder().decode(ids)
    for a, sign, b, result in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text):
        assert int(result) == RESULTS[sign](int(a), int(b))
    assert sum(label != -100 for label in labels) == train_models.DRILL_CALCULATIONS


def test_tokenizer_round_trip_and_agreement_with_the_encoder():
    tokenizer, encoder = build_tokenizer(), Encoder()
    for problem in drawn(50):
        words, _ = corpus.render(corpus.answer_slots(problem), corpus.draft_style(problem.item, 0.45))
        text = corpus.question_text(problem) + " " + " ".join(words)
        ids = tokenizer(text)["input_ids"]
        assert ids == encoder.encode(text.split())
        assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text == encoder.decode([*ids, EOS_ID])
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id}) == 3


def test_unknown_word_is_named():
    with pytest.raises(ValueError, match="bananas"):
        Encoder().encode(["bananas"])


def test_hugging_face_export_gives_the_same_logits(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = SmallLlama(Shape(vocab=len(Encoder().tokens), dim=64, layers=2, heads=2, ff=96))
    for gain in model.others()[1:]:
        torch.nn.init.uniform_(gain, 0.5, 1.5)
    export(model, tmp_path)
    ids = torch.randint(0, model.shape.vocab, (3, 40))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.head_dim == 32
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(ids), atol=1e-5, rtol=1e-5)


def test_kept_positions_have_the_hidden_states_of_the_full_forward():
    torch.manual_seed(0)
    model = SmallLlama(Shape(vocab=20, dim=64, layers=2, heads=2, ff=96))
    ids, keep = torch.randint(0, 20, (3, 40)), torch.rand(3, 40) < 0.4
    torch.testing.assert_close(model.hidden(ids, keep), model.hidden(ids)[keep], atol=1e-5, rtol=1e-5)


def test_sharded_gradient_is_the_gradient_of_the_whole_batch():
    encoder, rng = Encoder(), random.Random(0)
    torch.manual_seed(0)
    model = SmallLlama(Shape(len(encoder.tokens), dim=32, layers=1, heads=1, ff=32))
    ((ids, labels),) = train_models.batches(lambda: train_models.target_row(rng, encoder, 0.2, 0.2), 1, 6, rng)
    logits = model(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    with ThreadPoolExecutor(2) as pool:
        train_models.backward(model, ids, labels, pool)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, atol=1e-6, rtol=1e-4)


def test_equal_seeds_train_equal_weights():
    encoder = Encoder()
    config = train_models.TrainConfig(Shape(len(encoder.tokens), dim=32, layers=1, heads=1, ff=32), 3, batch_size=4)
    first, again, other = (
        train_models.train(config, lambda rng: train_models.draft_row(rng, encoder, 0.45), seed).embedding
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_splits_share_no_text():
    splits = questions.draw_questions({"train": 300, "val": 100, "test": 200}, 3, build_tokenizer())
    texts = [q.question for split in questions.SPLITS for q in splits[split]]
    assert len(set(texts)) == 600
    assert len({q.question_id for split in questions.SPLITS for q in splits[split]}) == 600
    assert all(q.ground_truth == str(read_and_solve(q.question)) for q in splits["test"])


@pytest.fixture(scope="module")
def tiny_testbed(tmp_path_factory):
    """A whole test bed of models that know nothing."""
    out = tmp_path_factory.mktemp("spd") / "testbed"
    root = out.parent / "models"
    shape = Shape(len(Encoder().tokens), dim=32, layers=1, heads=1, ff=32)
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        model = SmallLlama(shape)
        model.embedding.data.mul_(0.02)  # else an untrained model repeats its input, and the two agree
        export(model, root / name)
    train, test = (write_questions(root / f"{split}.jsonl", problems)
                   for split, problems in (("train", drawn(12)[:9]), ("test", drawn(12)[9:])))
    arguments = ["--out", str(out), "--train-questions", str(train), "--test-questions", str(test), "--target",
                 str(root / "target"), "--draft", str(root / "draft"),
                 "--n-train-questions", "6", "--n-val-questions", "3", "--n-test-questions", "3",
                 "--n-train-blocks", "20", "--n-val-blocks", "5", "--n-harm-blocks", "5", "--max-new-tokens", "12",
                 "--gamma", "4", "--processes", "2", "--batch-size", "2", "--dtype", "float32"]
    prepare_blocks.main(arguments)
    return out, arguments


def test_testbed_has_every_file_and_true_blocks(tiny_testbed):
    out, _ = tiny_testbed
    figures = json.loads((out / "testbed.json").read_text())["figures"]
    assert figures["target_accuracy"] == 0.0
    assert set(json.loads((out / "timings.json").read_text())["phases"]) >= {"models", "questions", "harm labels"}
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(out / "target")
    for split in ("train", "val"):
        metadata = pd.read_parquet(out / f"metadata_{split}.parquet")
        rows = pd.read_parquet(out / f"blocks_{split}.parquet")
        assert set(rows.question_id) <= set(metadata.question_id) and len(rows) == figures[f"{split}_blocks"] > 0
        for row in rows.itertuples():
            ids = torch.tensor([[*row.context_ids, *row.draft_ids]])
            seen = target(input_ids=ids).logits[0, len(row.context_ids) - 1 :].argmax(-1).tolist()
            assert list(row.target_ids) == seen
            assert list(row.draft_ids) != seen[:-1]


def test_a_second_run_reuses_the_first(tiny_testbed):
    out, arguments = tiny_testbed
    before = (out / "testbed.json").stat().st_mtime_ns
    prepare_blocks.main(arguments)
    assert (out / "testbed.json").stat().st_mtime_ns == before


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no testbed.json"):
        prepare_blocks.main(["--out", str(tmp_path)])


def test_harm_is_counterfactual():
    """A pair with a scripted target: only the second mismatch of the block turns the answer wrong."""
    encoder = Encoder()
    end = encoder.encode(["answer", "is"])
    question = questions.Question("q", "", [10], "3")
    files = pair.PairFiles(None, "cpu", 1, 4, max_new_tokens=8, batch_size=2)
    scripted = pair.Pair(files, encoder.decode, frozenset([EOS_ID]), None)
    calls = []

    def complete(role, prompts, progress, limits):
        assert role == "target"
        calls.extend(prompts)
        said = ["4" if encoder.ids["half"] in prompt else "3" for prompt in prompts]
        return [[*end, encoder.ids[number], EOS_ID] for number in said]

    object.__setattr__(scripted, "greedy", complete)
    draft, target = encoder.encode("she twice half pens".split()), encoder.encode("kim twice twice pens so".split())
    rows = [blocks.DraftedBlock("b", "q", [10], draft, target, True, 7, 1),
            blocks.DraftedBlock("never right", "q", [10], draft, target, False, 7, 1)]
    labels = blocks.harm_labels(scripted, rows, {"q": question}, lambda *_: None)
    assert calls == [[10, *draft[:1]], [10, *draft[:3]]]
    assert [(x.block_id, x.position, x.harmful, x.already_broken) for x in labels] == [
        ("b", 0, False, False), ("b", 2, True, False)]
    # With 6 tokens from the end of the question the four that the target writes do not fit after three of the draft.
    tight = pair.Pair(replace(files, max_new_tokens=6), encoder.decode, frozenset([EOS_ID]), None)
    object.__setattr__(tight, "greedy", complete)
    answers = tight.answers([question] * 2, [[10, *draft[:1]], [10, *draft[:3]]], quiet)
    assert [len(ids) for ids in answers] == [5, 6]
    assert tight.is_right(answers[0], question) and not tight.is_right(answers[1], question)


@pytest.fixture(scope="module")
def shared_work():
    with workers.Workers(2) as shared:
        yield shared


@pytest.fixture
def asked():
    return questions.draw_questions({"train": 5, "val": 0, "test": 0}, 0, build_tokenizer())["train"]


def quiet(*_):
    pass


def tiny_pair(out, work, batch_size=2):
    return pair.open_pair(pair.PairFiles(out, "cpu", 1, 4, 20, batch_size), Encoder().decode, work)


def test_own_path_is_the_targets_greedy_text(tiny_testbed, shared_work, asked):
    both = tiny_pair(tiny_testbed[0], shared_work)
    own = both.greedy("target", [q.prompt_ids for q in asked], quiet)
    assert both.speculative(asked, pair.EXACT, quiet).tokens == own
    target = hf_tasks._load(both.files)["target"]
    assert greedy_generate(target, [asked[0].prompt_ids], max_new_tokens=20, eos_token_id=EOS_ID).tokens == own[:1]


def test_drifted_blocks_lie_on_the_rules_path(tiny_testbed, shared_work, asked):
    both = tiny_pair(tiny_testbed[0], shared_work)
    everything = both.speculative(asked, pair.EVERYTHING, quiet)
    drifted = blocks.drifted_blocks(both, asked, 1e9, 1000, 0, quiet)
    prompts = {q.question_id: q.prompt_ids for q in asked}
    said = {q.question_id: tokens for q, tokens in zip(asked, everything.tokens, strict=True)}
    names = []
    own = blocks.own_paths(both, [(asked, 1000, 0)], 0, lambda done, of, name="": names.append(name))[0].blocks
    assert list(dict.fromkeys(names)) == ["", "(blocks)"]
    ids = {b.block_id for b in [*drifted, *own]}
    assert len(drifted) == len(everything.blocks) and len(ids) == len(drifted) + len(own)
    for block in drifted:
        behind = len(block.context_ids) - len(prompts[block.question_id])
        assert behind % 5 == 0  # all 4 drafted tokens and one of the target a round
        assert block.context_ids == prompts[block.question_id] + said[block.question_id][:behind]


def test_blocks_start_anywhere_in_the_answer_and_stay_on_the_same_text(tiny_testbed, shared_work, asked):
    both = tiny_pair(tiny_testbed[0], shared_work)
    at_zero = both.speculative(asked, pair.EXACT, quiet)
    offsets = [3, 0, 1, 2, 5]
    moved = both.speculative(asked, pair.EXACT, quiet, offsets)
    assert moved.tokens == at_zero.tokens
    first = {}
    for question, context, _, _ in moved.blocks:
        first.setdefault(question.question_id, len(context) - len(question.prompt_ids))
    least = {q.question_id: offset for q, offset in zip(asked, offsets, strict=True)}
    assert all(first[name] >= least[name] for name in first) and moved.blocks != at_zero.blocks
    # A round is 4 drafted tokens and one more.
    everything = both.speculative(asked, pair.EVERYTHING, quiet, offsets).blocks
    for question, context, _, _ in everything:
        assert (len(context) - len(question.prompt_ids) - least[question.question_id]) % 5 == 0


def test_tokens_before_the_first_block_count_in_no_forward(tiny_testbed, shared_work, asked):
    both = tiny_pair(tiny_testbed[0], shared_work)
    (path,) = blocks.own_paths(both, [(asked, 1000, 8)], 0, quiet)
    starts = blocks.drawn_offsets(len(asked), 8, 0)
    decoding = both.speculative(asked, pair.EXACT, quiet, starts)
    assert sum(starts) > 0 and path.tokens_per_forward == sum(decoding.decoded) / sum(decoding.rounds)
    most = [accepted + rounds for accepted, rounds in zip(decoding.accepted, decoding.rounds, strict=True)]
    assert all(n - 1 <= decoded <= n for n, decoded in zip(most, decoding.decoded, strict=True))


def test_two_vocabularies_are_refused(tiny_testbed, shared_work, tmp_path):
    (tmp_path / "target").symlink_to(tiny_testbed[0] / "target")
    shutil.copytree(tiny_testbed[0] / "draft", tmp_path / "draft")
    make_tokenizer().save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="the draft has another vocabulary than the target"):
        tiny_pair(tmp_path, shared_work)


@pytest.mark.parametrize(("rows", "most", "processes", "sizes"), [
    (1000, 200, 2, [166, 167, 167, 166, 167, 167]), (5, 200, 2, [2, 3]), (5, 2, 1, [1, 2, 2]), (0, 4, 2, [])])
def test_parts_are_equal_and_as_many_for_each_process(rows, most, processes, sizes):
    cut = workers.parts(range(rows), most, processes)
    assert [len(part) for part in cut] == sizes
    assert [row for part in cut for row in part] == list(range(rows))


def slowest_first(part):
    time.sleep(0.02 * (4 - part[0]))
    return sum(part)


def test_results_come_in_order_and_progress_reaches_the_end(shared_work):
    seen = []
    assert shared_work.map(slowest_first, [1, 2, 3, 4], 1, lambda *at: seen.append(at)) == [1, 2, 3, 4]
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def half_told(part):
    return workers.report_share(0.5) or part


def test_progress_counts_the_shares_that_running_parts_tell(shared_work):
    seen = []
    assert shared_work.map(half_told, [1, 2], 2, lambda *at: seen.append(at)) == [[1], [2]]
    assert seen[:2] == [(0, 2), (0.5, 2)] and seen[-1] == (2, 2)


def fail(number):
    if number == 2:
        raise KeyError("part 2 is bad")


def test_a_workers_error_ends_the_command():
    with workers.Workers(2) as work, pytest.raises(KeyError, match="part 2 is bad"):
        work.run([partial(fail, 1), partial(fail, 2), *[partial(time.sleep, 0.1)] * 100], quiet)


def test_a_killed_worker_is_named():
    with workers.Workers(2) as work, pytest.raises(RuntimeError, match="a worker process was killed.*--processes"):
        work.run([partial(os._exit, 9)], quiet)


def hold_workers(pids):
    with workers.Workers(2) as work:
        pids.put(work.run([os.getpid], quiet) + list(work._pool._processes))
        time.sleep(60)


def test_workers_end_with_a_killed_parent():
    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    parent = context.Process(target=hold_workers, args=(pids,))
    parent.start()
    left = set(pids.get())
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    assert becomes(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), 10), left
