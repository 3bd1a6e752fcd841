"""The rollout over the actor's own module, against slow generation without a cache."""

import contextlib

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from tests.helpers.engines import FakeEngine, left_padded, make_engine
from tests.helpers.ranks import run_ranks
from tests.models.families import model_of
from verl.config.rollout import SamplingConfig
from verl.rollout.hf_rollout import HFRollout, choose
from verl.rollout.sampling import GenerationRequest, Sampling
from verl.training.policy import get_policy
from verl.workers.config import RolloutConfig

PAD = 0


def rollout(path, engine=None, **changes):
    settings = {"name": "hf", "mode": "sync", "prompt_length": 6, "response_length": 5} | changes
    made = HFRollout(RolloutConfig(**settings), model_config=None, device_mesh=None)
    made.bind_actor(engine or FakeEngine(LlamaForCausalLM.from_pretrained(path)), policy=None)
    return made


def prompts(lengths=(6, 3, 4), seed=0, **meta):
    return left_padded(lengths, 6, seed, **{"n": 1, **meta})


def slow_greedy(model, ids, limit, eos):
    """One prompt without padding, the full text read again for every token."""
    out = []
    for _ in range(limit):
        token = int(model(input_ids=torch.tensor([ids + out])).logits[0, -1].argmax())
        out.append(token)
        if token in eos:
            break
    return out


def kept(ids, mask):
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def answers(output):
    return kept(output.batch["responses"], output.batch["response_mask"])


def test_greedy_equals_the_uncached_loop_and_stops_each_row_on_its_own(llama):
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    batch = prompts(do_sample=False)
    plain = kept(batch.batch["input_ids"], batch.batch["attention_mask"])
    free = [slow_greedy(model, ids, 5, ()) for ids in plain]
    eos = [free[1][1]]  # a token that row 1 gives second
    expected = [slow_greedy(model, ids, 5, eos) for ids in plain]
    assert len(expected[1]) <= 2
    batch.meta_info["eos_token_id"] = eos
    assert answers(rollout(llama).generate_sequences(batch)) == expected
    batch.meta_info["eos_token_id"] = None
    assert answers(rollout(llama).generate_sequences(batch)) == free


def test_output_is_right_padded_and_positions_go_on(llama):
    batch = prompts(do_sample=False)
    first = answers(rollout(llama).generate_sequences(batch))
    batch.meta_info["eos_token_id"] = first[1][1]
    out = rollout(llama).generate_sequences(batch).batch
    length = int(out["response_mask"][1].sum())
    assert out["responses"][1, length:].tolist() == [PAD] * (5 - length)
    assert torch.equal(out["attention_mask"], torch.cat([batch.batch["attention_mask"], out["response_mask"]], 1))
    assert torch.equal(out["input_ids"], torch.cat([batch.batch["input_ids"], out["responses"]], 1))
    assert out["position_ids"][1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_samples_of_a_prompt_are_adjacent_and_differ(llama):
    batch = prompts(n=3)
    out = rollout(llama).generate_sequences(batch).batch
    assert torch.equal(out["prompts"], batch.batch["input_ids"].repeat_interleave(3, 0))
    rows = [tuple(row) for row in out["responses"].tolist()]
    assert len(set(rows[:3])) == 3


def test_rows_that_are_done_leave_the_batch_and_change_no_answer(llama):
    engine = FakeEngine(LlamaForCausalLM.from_pretrained(llama))
    made = rollout(llama, engine, response_length=12, calculate_log_probs=True)
    made.compared = True  # the comparison is one more forward
    batch = prompts(n=8, eos_token_id=list(range(5, 20)))  # about every fourth token
    sizes = []
    hook = engine.module.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    out = made.generate_sequences(batch).batch
    hook.remove()
    running = out["response_mask"].sum(0).tolist()  # at each token
    assert sizes[0] == 3 and len(sizes) == sum(count > 0 for count in running)
    for count, size in zip(running[1 : len(sizes)], sizes[1:], strict=True):
        assert count <= size and (count > 0.75 * size or size == 1)
    assert min(sizes[1:]) < 4 < 20 < max(sizes)
    small = rollout(llama, response_length=12, max_num_seqs=2).generate_sequences(batch).batch
    assert torch.equal(small["responses"], out["responses"])
    for i in range(3):
        alone = made.generate_sequences(batch[i : i + 1]).batch
        mine = slice(8 * i, 8 * i + 8)
        assert torch.equal(alone["responses"], out["responses"][mine])
        assert torch.allclose(alone["rollout_log_probs"], out["rollout_log_probs"][mine], atol=1e-5)


def test_another_seed_draws_other_samples_in_training_and_validation(tiny_llama):
    sampled = SamplingConfig(do_sample=True, temperature=1.0)
    for meta in ({}, {"validate": True}):
        made = (rollout(tiny_llama, seed=seed, val_kwargs=sampled) for seed in (1, 1, 2))
        one, again, two = (each.generate_sequences(prompts(n=2, **meta)) for each in made)
        assert answers(one) == answers(again)
        assert not {tuple(row) for row in answers(one)} & {tuple(row) for row in answers(two)}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_log_probs_are_the_actors(llama, temperature):
    made = rollout(llama, calculate_log_probs=True)
    out = made.generate_sequences(prompts(n=2, temperature=temperature)).batch
    keys = ("responses", "input_ids", "attention_mask", "position_ids")
    data = TensorDict({key: out[key] for key in keys}, batch_size=len(out))
    log_probs, _ = get_policy("causal_lm").log_probs(
        made.engine.module, data, temperature=temperature, with_entropy=False
    )
    mask = out["response_mask"]
    assert torch.allclose(out["rollout_log_probs"], log_probs.detach() * mask, atol=1e-4)


def test_with_filters_the_log_probs_are_those_of_what_was_drawn_from(llama):
    made = rollout(llama, calculate_log_probs=True, top_k=5, top_p=0.6)
    out = made.generate_sequences(prompts(n=3, temperature=0.7)).batch
    with torch.no_grad():
        inputs = {key: out[key] for key in ("input_ids", "attention_mask", "position_ids")}
        probs = (made.engine.module(**inputs).logits[:, 5:-1].float() / 0.7).softmax(-1)
    ordered, words = probs.sort(-1, descending=True)
    ordered[..., 5:] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)  # top-p is a share of what top-k leaves
    ordered[ordered.cumsum(-1) - ordered >= 0.6] = 0.0
    allowed = torch.zeros_like(probs).scatter(-1, words, ordered / ordered.sum(-1, keepdim=True))
    drawn = allowed.gather(-1, out["responses"].unsqueeze(-1)).squeeze(-1)
    kept = out["response_mask"].bool()
    assert kept.sum() > 20 and torch.allclose(out["rollout_log_probs"][kept].exp(), drawn[kept], atol=1e-4)


def test_validation_uses_its_own_settings(llama):
    made = rollout(llama, temperature=0.7, val_kwargs=SamplingConfig(temperature=0.3, top_k=4, top_p=0.9))
    with pytest.raises(RuntimeError, match="bind_actor"):
        HFRollout(made.config, model_config=None, device_mesh=None).generate_sequences(prompts())

    def request(**meta):
        batch = prompts()
        batch.meta_info = {"eos_token_id": 2, "pad_token_id": 0, **meta}
        return GenerationRequest.from_batch(batch, made.config)

    assert request(temperature=0.7).sampling == Sampling(False, 0.7, -1, 1.0)
    assert request(temperature=0.7, validate=True).sampling == Sampling(False, 0.3, 4, 0.9)
    assert request(do_sample=False).sampling.greedy
    assert request(eos_token_id=[2, 3]).eos_ids == (2, 3) and request(eos_token_id=None).eos_ids == ()
    assert request(global_steps=4).seeds[0][0] != request(global_steps=5).seeds[0][0]


LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


@pytest.mark.parametrize(
    "uniform, sampling, token",
    [
        (0.51, Sampling(False, 1.0, -1, 1.0), 1),
        (0.96, Sampling(False, 1.0, 2, 1.0), 1),  # top-k 2: 0.5 and 0.3
        (0.62, Sampling(False, 1.0, 2, 1.0), 0),  # 0.62 * 0.8 < 0.5
        (0.99, Sampling(False, 1.0, -1, 0.7), 1),  # top-p 0.7: the first two reach it
        (0.99, Sampling(True, 1.0, -1, 1.0), 0),
    ],
)
def test_choice_inverts_the_cumulative_distribution(uniform, sampling, token):
    got, log_prob, _ = choose(LOGITS, torch.tensor([uniform]), sampling)
    assert got.item() == token
    assert log_prob.item() == pytest.approx(LOGITS[0, token].item(), rel=1e-5)


@pytest.mark.parametrize(
    "sampling, token, share",
    [
        (Sampling(False, 1.0, 2, 1.0), 1, 0.3 / 0.8),
        (Sampling(False, 1.0, -1, 0.9), 2, 0.15 / 0.95),  # the first three reach 0.9
        (Sampling(True, 1.0, 2, 1.0), 0, 0.5),  # greedy ignores the filters
    ],
)
def test_the_log_prob_among_the_allowed_tokens(sampling, token, share):
    got, log_prob, _ = choose(LOGITS, torch.tensor([0.999]), sampling, filtered=True)
    assert got.item() == token and log_prob.exp().item() == pytest.approx(share, rel=1e-5)


def test_frequencies_follow_the_tempered_distribution():
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    tokens, *_ = choose(LOGITS.expand(20000, 4), uniform, Sampling(False, 0.5, -1, 1.0))
    assert torch.allclose(tokens.bincount(minlength=4) / 20000, (2 * LOGITS[0]).softmax(-1), atol=0.015)


def on_ranks(rank, world_size, path):
    """Each rank answers its own prompts; rank 1's stop early, while rank 0 continues."""
    engine = make_engine(path)
    batch = prompts(lengths=(6, 3, 4, 5), n=2)
    share = 4 // world_size
    part = batch[rank * share : (rank + 1) * share]
    part.meta_info["eos_token_id"] = list(range(64)) if rank == 1 else None
    out = rollout(path, engine=engine).generate_sequences(part).batch
    return np.asarray(out["responses"]), np.asarray(out["response_mask"])


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_answer_as_one_and_wait_for_each_other(tiny_llama):
    (first, first_mask), (second, second_mask) = run_ranks(on_ranks, 2, tiny_llama)
    whole = rollout(tiny_llama).generate_sequences(prompts(lengths=(6, 3, 4, 5), n=2, eos_token_id=None))
    expected = whole.batch["responses"].numpy()
    assert np.array_equal(first, expected[:4]) and first_mask.all()
    assert np.array_equal(second[:, 0], expected[4:, 0])
    assert second_mask.sum(1).tolist() == [1] * 4 and not second[:, 1:].any()


def gathered_while_it_generates(rank, world_size, path):
    """All-gathers of one forward, of generation of five tokens, and of a forward behind it."""
    engine = make_engine(path)
    made, batch = rollout(path, engine=engine), prompts(n=2, eos_token_id=None)
    ids = torch.ones(1, 3, dtype=torch.long)

    def counted(work):
        with torch.profiler.profile() as seen, torch.no_grad():
            work()
        return sum(event.name == "c10d::_allgather_base_" for event in seen.events())

    def forward():
        with engine.eval_mode():
            engine.module(input_ids=ids)

    return [counted(work) for work in (forward, lambda: made.generate_sequences(batch), forward)]


@pytest.mark.process
@pytest.mark.slow
def test_weights_are_gathered_once_for_all_tokens_and_resharded_after_them(tiny_llama):
    for gathers in run_ranks(gathered_while_it_generates, 2, tiny_llama):
        assert gathers[0] > 1 and gathers == [gathers[0]] * 3


def test_a_cache_that_changes_log_probs_ends_the_run_with_the_models_name(llama):
    """A model that reads other tokens where it has a cache."""
    engine = FakeEngine(LlamaForCausalLM.from_pretrained(llama))

    def others(module, args, inputs):
        if inputs["use_cache"] and inputs["input_ids"].shape[1] == 1:
            inputs["input_ids"] = (inputs["input_ids"] + 1) % 60
        return args, inputs

    made = rollout(llama, engine)
    made.generate_sequences(prompts(eos_token_id=None))
    assert made.compared
    engine.module.register_forward_pre_hook(others, with_kwargs=True)
    made = rollout(llama, engine)
    with pytest.raises(ValueError, match="with its cache LlamaForCausalLM gives .*rollout.name=vllm, or sglang"):
        made.generate_sequences(prompts(eos_token_id=None))


@pytest.mark.parametrize(("rows", "raises"), [(1, False), (12, True)])
def test_in_half_precision_the_mean_over_rows_is_compared(llama, rows, raises):
    """Of 12 rows, 1 or all have log-probs that differ by 0.3 with a cache."""
    engine = FakeEngine(LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16))

    def disturbed(module, args, inputs, output):
        if inputs["use_cache"] and inputs["input_ids"].shape[1] == 1:
            output.logits[:rows, :, ::2] += 0.6

    engine.module.register_forward_hook(disturbed, with_kwargs=True)
    made = rollout(llama, engine)
    with pytest.raises(ValueError, match="differ by 0[.].*limit 0.05") if raises else contextlib.nullcontext():
        made.generate_sequences(prompts(n=4, eos_token_id=None))
    assert made.compared


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Mamba"])
def test_states_of_convolutions_and_recurrences_follow_the_rows(name):
    model = model_of(name)
    made = rollout(None, FakeEngine(model), response_length=12, calculate_log_probs=True)
    batch = prompts(n=4, eos_token_id=list(range(5, 20)))
    sizes = []
    model.register_forward_pre_hook(lambda *given: sizes.append(len(given[2]["input_ids"])), with_kwargs=True)
    together = made.generate_sequences(batch).batch
    assert min(sizes[1:]) < max(sizes[1:])
    for i in range(3):
        alone = made.generate_sequences(batch[i : i + 1]).batch
        assert torch.equal(alone["responses"], together["responses"][4 * i : 4 * i + 4])
