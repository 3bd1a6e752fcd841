"""The spd rollout: what it asks for, what it records, that ranks and lost completions change nothing they must not."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.spd.rollout import spd_rollout
from recipe.spd.rollout.spd_rollout import LostCompletionsError
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, SPDInputData
from tests.helpers.columns import object_columns
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.ranks import run_ranks
from tests.spd.test_client import FakeServer, fail
from verl.protocol import DataProto
from verl.rollout.base import get_rollout_class
from verl.training.policy import get_policy
from verl.workers.config import RolloutConfig

TOKENIZER = make_tokenizer([*WORDS, "answer", "is"])
ANSWER, IS = TOKENIZER.convert_tokens_to_ids(["answer", "is"])
GAMMA = 3
CONTEXTS = [[30, 31, 32], [33, 34], [35, 36, 37, 38], [39]]
DRAFTS = [[10, 11, 12], [13, 14], [15, 16, 17], [18, 19, 20]]
TARGETS = [[10, 21, 12, 22], [23, 14, 24], [25, 16, 17, 26], [18, 19, 27, 28]]
CORRECT = [1, 1, 1, 0]  # what the target answers after the last id of each context, as AnsweringServer does
RECORDED = [1, 0, 1, 0]  # by the engine that made the blocks


class AnsweringServer(FakeServer):
    """Writes "answer is 4" after an even last id, "answer is 5" after an odd one."""

    def complete(self, prompt):
        return [ANSWER, IS, 5 + 4 + prompt[-1] % 2, 2], "stop"

    @property
    def asked(self) -> list[tuple[int, ...]]:
        return [tuple(p) for body in self.requests for p in body["prompt"]]


def prompts(rows=range(4), n=8, step=1, width=16, **meta) -> DataProto:
    rows = list(rows)
    pick = lambda values: [values[i] for i in rows]  # noqa: E731
    inputs = SPDInputData.from_blocks(pick(CONTEXTS), pick(DRAFTS), pick(TARGETS), sep_token_id=3, pad_token_id=0)
    grow = width - inputs.input_ids.shape[1]
    pad = torch.nn.functional.pad
    tensors = {k: pad(v, (grow, 0)) for k, v in inputs.as_kwargs().items() if k != "spd_layout"}
    shift = torch.tensor([grow, 0, grow, 0, grow])
    tensors.update(spd_layout=inputs.spd_layout + shift, sample_index=torch.tensor(rows))
    infos = [
        {
            "index": i, "context_ids": CONTEXTS[i], "draft_ids": DRAFTS[i], "target_ids": TARGETS[i],
            "is_correct_baseline": RECORDED[i], "ground_truth": "4",
        }
        for i in rows
    ]  # fmt: skip
    data = DataProto.from_dict(tensors=tensors, non_tensors=object_columns(extra_info=infos))
    data.meta_info.update({"n": n, "do_sample": True, "validate": False, "global_steps": step, **meta})
    return data


@contextmanager
def rollout(directory, url, store, temperature=0.7, reward=None, **changes):
    options = {
        "servers": [url] if url else None, "served_model": "served" if url else None, "server_args": [],
        "server_log": f"{store}.log", "start_timeout_s": 280.0, "max_model_len": None, "store_path": str(store),
        "lost_share_max": 0.5, "rounds": 1, "draft_path": None, "max_tokens": 16, "timeout_s": 30.0, "attempts": 1,
        "prompts_per_request": 8, "concurrency": 2,
    }  # fmt: skip
    custom = {name: changes.pop(name) for name in ("loss_positions", "truncated") if name in changes}
    custom |= {"target_path": directory, "seed": 42, "reward": reward or {}, "rollout": {**options, **changes}}
    config = RolloutConfig(
        name="spd", mode="sync", temperature=temperature, prompt_length=16, response_length=GAMMA, custom=custom
    )
    made = get_rollout_class("spd", "sync")(config, SimpleNamespace(tokenizer=TOKENIZER), None)
    scorer = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=directory)).eval()
    engine = SimpleNamespace(module=scorer, device=torch.device("cpu"), eval_mode=nullcontext, autocast=nullcontext)
    made.bind_actor(engine, get_policy("bernoulli"))
    try:
        yield made
    finally:
        made.close()


def test_outcomes_of_a_batch(tiny_llama, tmp_path):
    server = AnsweringServer()
    with server.running() as url, rollout(tiny_llama, url, tmp_path / "c") as made:
        out = made.generate_sequences(prompts())
        again = made.generate_sequences(prompts())
    assert len(out) == 32 and out.batch["responses"].shape == (32, GAMMA)
    assert out.batch["attention_mask"].shape == (32, 16 + GAMMA) and out.batch["input_ids"].shape == (32, 16)
    for k in range(32):
        b, info = k // 8, out.non_tensor_batch["extra_info"][k]
        draft, target, actions = DRAFTS[b], TARGETS[b], out.batch["responses"][k].tolist()
        length = next((i for i, d in enumerate(draft) if d != target[i] and not actions[i]), len(draft))
        assert info["effective_len"] == length
        mismatches = [i for i in range(len(draft)) if draft[i] != target[i]]
        expected = [int(i in mismatches and i <= length) for i in range(GAMMA)]
        assert out.batch["response_mask"][k].tolist() == expected
        taken = [i for i in mismatches if i < length]
        if not taken:  # L = 0, or the target's own path
            assert info["is_correct_hybrid"] == CORRECT[b] and not info["asked"]
        else:
            last = target[length]  # correction or bonus token
            assert info["is_correct_hybrid"] == int(last % 2 == 0) and info["asked"]
            assert (*CONTEXTS[b], *draft[:length], last) in server.asked
            assert info["hybrid_length"] == length + 1 + 3
    assert len(server.asked) == len(set(server.asked))  # each distinct context once, though 8 samples share it
    assert not out.non_tensor_batch["__lost__"].any()
    assert [i["is_correct_baseline"] for i in out.non_tensor_batch["extra_info"][::8]] == CORRECT
    assert {tuple(c) for c in CONTEXTS} <= set(server.asked)  # the baselines come from the same server
    metrics, later = out.meta_info["metrics"], again.meta_info["metrics"]
    assert metrics["spd/completions/asked"] == metrics["spd/completions/requested"] == len(server.asked)
    assert metrics["spd/baseline/changed"] == 0.25 and metrics["spd/baseline/truncated"] == 0
    assert (metrics["spd/completions/hit_rate"], later["spd/completions/hit_rate"]) == (0, 1)
    files = [file for file in (tmp_path / "c", tmp_path / "c-wal") if file.exists()]
    assert 0 < later["spd/store/mib"] <= sum(file.stat().st_size for file in files) / 2**20 + 4
    assert metrics["spd/store/mib"] == later["spd/store/mib"]  # nothing was added
    assert later["spd/completions/asked"] == 0 and later["spd/completions/stored"] == len(server.asked)
    assert sum(metrics[f"spd/scenario/{s}"] for s in ("A", "B", "C", "D", "zero")) == pytest.approx(1)
    assert torch.equal(out.batch["responses"], again.batch["responses"])


def test_recorded_log_probs_are_those_of_the_policy_at_the_same_temperature(tiny_llama, tmp_path):
    with AnsweringServer().running() as url, rollout(tiny_llama, url, tmp_path / "c", temperature=0.7) as made:
        out = made.generate_sequences(prompts())
        log_p, _ = made.policy.log_probs(made.engine.module, out.batch, temperature=0.7, with_entropy=False)
        other, _ = made.policy.log_probs(made.engine.module, out.batch, temperature=1.0, with_entropy=False)
    counted = out.batch["response_mask"].bool()
    assert torch.allclose(out.batch["rollout_log_probs"][counted], log_p[counted], atol=1e-5)
    assert not torch.allclose(out.batch["rollout_log_probs"][counted], other[counted], atol=1e-3)


def test_further_rounds_write_on_before_the_completion_is_asked(tiny_llama, tmp_path):
    server = AnsweringServer()
    more = {"rounds": 2, "draft_path": tiny_llama}  # draft and target are one model: every further block is taken whole
    with server.running() as url, rollout(tiny_llama, url, tmp_path / "c", **more) as made:
        out = made.generate_sequences(prompts())
        model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    for info, actions in zip(out.non_tensor_batch["extra_info"], out.batch["responses"].tolist(), strict=True):
        b, length = info["index"], info["effective_len"]
        if length == 0:  # the target's own next token: its own answer
            assert not info["asked"] and info["is_correct_hybrid"] == CORRECT[b]
            continue
        hybrid = [*CONTEXTS[b], *DRAFTS[b][:length], TARGETS[b][length]]
        new = model.generate(
            torch.tensor([hybrid]), do_sample=False, max_new_tokens=GAMMA + 1, eos_token_id=sorted(made.eos),
            pad_token_id=0,
        )[0].tolist()  # fmt: skip
        if new[-1] in made.eos:
            assert not info["asked"] and info["hybrid_length"] == len(new) - 1 - len(CONTEXTS[b])
        else:
            assert tuple(new) in server.asked and len(new) == len(hybrid) + GAMMA + 1
            assert info["hybrid_length"] == length + 1 + GAMMA + 1 + 3, actions


def test_validation_is_greedy(tiny_llama, tmp_path):
    with AnsweringServer().running() as url, rollout(tiny_llama, url, tmp_path / "c") as made:
        out = made.generate_sequences(prompts(n=1, validate=True, do_sample=False))
        z = made.policy.scores(made.engine.module, out.batch)
    drafted = out.batch["attention_mask"][:, -GAMMA:].bool()
    assert torch.equal(out.batch["responses"].bool()[drafted], (z > 0)[drafted])


def test_loss_on_all_mismatches_when_asked(tiny_llama, tmp_path):
    with AnsweringServer().running() as url, rollout(tiny_llama, url, tmp_path / "c", loss_positions="all") as made:
        out = made.generate_sequences(prompts(n=1))
    assert out.batch["response_mask"].tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]]


def test_a_lost_completion_is_no_wrong_answer(tiny_llama, tmp_path):
    with AnsweringServer(fail).running() as url:
        with rollout(tiny_llama, url, tmp_path / "c", lost_share_max=1.0) as made:
            out = made.generate_sequences(prompts())
        lost = out.non_tensor_batch["__lost__"] == "lost"
        infos = out.non_tensor_batch["extra_info"]
        assert lost.any() and all(lost[k] == (infos[k]["is_correct_hybrid"] is None) for k in range(32))
        assert out.meta_info["metrics"]["spd/dropped_samples"] == lost.sum()
        assert out.meta_info["metrics"]["spd/completions/failed"] > 0
        with rollout(tiny_llama, url, tmp_path / "c", lost_share_max=0.01) as made:
            with pytest.raises(LostCompletionsError, match="spd.rollout.lost_share_max=0.01"):
                made.generate_sequences(prompts())


def test_masked_zero_lengths_leave_the_batch(tiny_llama, tmp_path):
    server, reward = AnsweringServer(), {"zero_length": "mask", "length_penalty": 1.0}
    with server.running() as url, rollout(tiny_llama, url, tmp_path / "c", reward=reward) as made:
        out = made.generate_sequences(prompts())
    infos = out.non_tensor_batch["extra_info"]
    assert list(out.non_tensor_batch["__lost__"]) == ["masked" if i["effective_len"] == 0 else "" for i in infos]
    assert all(i["baseline_length"] == 3 for i in infos)
    assert out.meta_info["metrics"]["spd/output_length_ratio"] > 1


@pytest.mark.parametrize(("limit", "question", "truncated"), [(9, 0, "exclude"), (7, 0, "exclude"), (7, 0, "keep"),
                                                              (12, 1, "exclude")])  # fmt: skip
def test_hybrid_and_baseline_share_one_limit_from_the_end_of_the_question(
    tiny_llama, tmp_path, limit, question, truncated
):
    """The target needs 4 tokens after any context, the end token included; the contexts have 3, 2, 4 and 1 tokens."""
    server, data = AnsweringServer(), prompts()
    for info in data.non_tensor_batch["extra_info"]:
        info["question_len"] = question
    options = {"max_tokens": limit, "truncated": truncated}
    with server.running() as url, rollout(tiny_llama, url, tmp_path / "c", **options) as made:
        out = made.generate_sequences(data)
    for k, info in enumerate(out.non_tensor_batch["extra_info"]):
        b, length = k // 8, info["effective_len"]
        begun = len(CONTEXTS[b]) - question if question else 0  # answer tokens in the context
        fits, room = begun + 4 <= limit, limit - begun - length - 1
        assert info["is_correct_baseline"] == (CORRECT[b] and fits)
        lost = out.non_tensor_batch["__lost__"][k]
        assert lost == ("masked" if not fits and truncated == "exclude" else "")
        if info["asked"]:
            assert info["is_correct_hybrid"] == int(TARGETS[b][length] % 2 == 0 and room >= 4)
    assert max(body["max_tokens"] for body in server.requests) <= limit
    cut = [question and len(c) - 1 + 4 > limit or 4 > limit for c in CONTEXTS]
    assert out.meta_info["metrics"]["spd/baseline/truncated"] == sum(cut) / 4


def test_answers_in_the_question_are_not_read(tiny_llama, tmp_path):
    class Silent(AnsweringServer):
        def complete(self, prompt):
            return [40, 2], "stop"

    data = prompts()
    example = [ANSWER, IS, 5 + 4]  # a worked example whose answer happens to be the truth
    for info in data.non_tensor_batch["extra_info"]:
        info["context_ids"] = [*example, *info["context_ids"]]
    verdicts = {}
    for length in (None, 3):
        for info in data.non_tensor_batch["extra_info"]:
            info["question_len"] = length
        with Silent().running() as url, rollout(tiny_llama, url, tmp_path / "c") as made:
            infos = made.generate_sequences(data).non_tensor_batch["extra_info"]
        verdicts[length] = {i["is_correct_hybrid"] for i in infos if i["asked"]}
    assert verdicts == {None: {1}, 3: {0}}


def test_colours_of_a_block_for_the_report(tiny_llama, tmp_path):
    with AnsweringServer().running() as url, rollout(tiny_llama, url, tmp_path / "c") as made:
        out = made.generate_sequences(prompts(rows=[0]))
    for k in range(8):
        kinds = [s["kind"] for s in out.non_tensor_batch["response_text"][k]]
        if out.non_tensor_batch["extra_info"][k]["effective_len"] == 1:
            assert kinds == ["match", "rejected", "unused", "correction"]
        else:
            assert kinds == ["match", "accepted", "match", "correction", "completion"]


def _on_rank(rank, world_size, directory, url, store):
    share = range(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    with rollout(directory, url, store) as made:
        out = made.generate_sequences(prompts(rows=share))
    return out.batch["responses"].numpy(), out.meta_info["metrics"]


@pytest.mark.process
def test_one_and_two_ranks_sample_the_same(tiny_llama, tmp_path):
    with AnsweringServer().running() as url:
        alone = _on_rank(0, 1, tiny_llama, url, tmp_path / "one")
        both = run_ranks(_on_rank, 2, tiny_llama, url, str(tmp_path / "two"))
    assert np.array_equal(alone[0], np.concatenate([responses for responses, _ in both]))
    assert both[0][1] == both[1][1] and both[0][1] == pytest.approx(alone[1], rel=1e-12)


@pytest.mark.parametrize(
    ("environment", "started"),
    [({}, 1), ({"LOCAL_RANK": "1"}, 0), ({"LOCAL_RANK": "0", "RAY_LOCAL_RANK": "1"}, 0),
     ({"LOCAL_RANK": "0", "RAY_LOCAL_RANK": "0"}, 1), ({"SPD_LOCAL_SERVER": "of the entry"}, 0)],
)  # fmt: skip
def test_the_first_rank_of_a_node_starts_a_server(tiny_llama, tmp_path, monkeypatch, environment, started):
    """With Ray every rank that sees one GPU has LOCAL_RANK 0."""
    for name in ("LOCAL_RANK", "RAY_LOCAL_RANK", "SPD_LOCAL_SERVER", "SPD_VLLM_URLS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    servers = []
    monkeypatch.setattr(spd_rollout, "server_of", lambda *a: (servers.append(a), SimpleNamespace(stop=list))[1])
    with rollout(tiny_llama, None, tmp_path / "c"):
        assert len(servers) == started


@pytest.mark.process
@pytest.mark.slow
def test_a_real_local_vllm_server_is_started_used_and_gone(tiny_llama, tmp_path):
    import psutil

    with rollout(tiny_llama, None, tmp_path / "c") as made:
        supervisor = psutil.Process(made.local_server._process.pid)
        out = made.generate_sequences(prompts(n=4))
        family = [supervisor, *supervisor.children(recursive=True)]
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        ids = [*CONTEXTS[0], 10, 11, 12, 22]
        wanted = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16)[0, len(ids) :].tolist()
        done, _ = made.completer.complete([(tuple(ids), 16)])
        assert list(done[tuple(ids), 16].token_ids) == [i for i in wanted if i != 2]
    assert out.meta_info["metrics"]["spd/completions/failed"] == 0
    assert len(family) > 1 and not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


def test_forwards_cut_by_tokens_give_the_scores_of_one_forward(tiny_llama, tmp_path):
    with rollout(tiny_llama, "http://127.0.0.1:1", tmp_path / "c") as made:
        whole = made._scores(prompts())
        rows = []
        made.engine.module.backbone.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)  # fmt: skip
        # The inputs have 13, 10, 14 and 11 ids.
        made.config = replace(made.config, log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=25)
        torch.testing.assert_close(made._scores(prompts()), whole)
        assert sorted(rows) == [2, 2]
        made.config = replace(made.config, log_prob_max_token_len_per_gpu=13)
        with pytest.raises(ValueError, match="max_token_len=13 is less than the longest sequence, 14 tokens"):
            made._scores(prompts())
