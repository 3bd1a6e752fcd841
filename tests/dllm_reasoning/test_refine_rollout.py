"""Rollout `refine` draws what rollout `hf` draws token by token, for any choice of windows."""

import pytest
import torch

from dllm_reasoning.inference.commit_rules import AdaptiveWindows, ForwardCosts, Row, Window, windows_of
from dllm_reasoning.inference.settings import NOISE_KEY, WINDOW_KEY, RefineRolloutSettings
from dllm_reasoning.rollout import RefineRollout
from tests.dllm_reasoning.models import EOS, PAD, VOCABULARY, tiny
from tests.helpers.engines import FakeEngine, make_engine
from tests.helpers.ranks import run_ranks
from verl.algos.acceptance import LenientAcceptance
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.rollout.hf_rollout import HFRollout
from verl.workers.config import RolloutConfig, SamplingConfig

LIMIT = 20


def rollout(cls, architecture="llama", **changes):
    settings = {"mode": "sync", "seed": 51, "prompt_length": 9, "response_length": LIMIT, "calculate_log_probs": True}
    made = cls(RolloutConfig(**settings | {"name": "refine"} | changes), model_config=None, device_mesh=None)
    model = tiny(architecture, seed=1)
    model.config.update({WINDOW_KEY: 5, NOISE_KEY: 3})
    made.bind_actor(FakeEngine(model), policy=None)
    return made


def prompts(**meta):
    lengths = torch.tensor([9, 3, 1, 6])
    mask = (torch.arange(9)[None] >= 9 - lengths[:, None]).long()
    ids = torch.randint(5, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(2)) * mask
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        meta_info={"n": 3, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "global_steps": 1} | meta,
    )


@pytest.mark.parametrize("architecture", ["llama", "tied", "qwen3"])
@pytest.mark.parametrize("mode", ["plain", "slide", "verify", "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 9, "top_p": 0.8}, {"do_sample": False}])
def test_tokens_and_log_probs_are_those_of_token_by_token_sampling(architecture, mode, sampling):
    meta = {"do_sample": sampling.get("do_sample", True), "temperature": sampling.get("temperature", 1.0)}
    expected = rollout(HFRollout, architecture, **sampling).generate_sequences(prompts(**meta))
    lengths = expected.batch["response_mask"].sum(-1)
    repeats = architecture == "tied" or not meta["do_sample"]
    assert lengths.min() < LIMIT or repeats  # rows end by themselves
    made = rollout(RefineRollout, architecture, custom={"mode": mode}, **sampling)
    for version in (1, 2):  # the second call continues with what the first one learned
        made.weights_version = version
        output = made.generate_sequences(prompts(**meta))
        for key in ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
            assert torch.equal(output.batch[key], expected.batch[key]), key
        difference = output.batch["rollout_log_probs"] - expected.batch["rollout_log_probs"]
        assert difference.abs().max() < 1e-4
    metrics = output.meta_info["metrics"]
    if mode == "plain":
        assert metrics == {"rollout/tokens_per_forward": [1.0], "rollout/forwards": [1 + int(lengths.max())]}
    else:
        assert metrics["rollout/tokens_per_forward"][0] > 1.0


def on_ranks(rank, world_size, path):
    """Each rank of a sharded model answers two prompts; those of rank 1 end early, while rank 0 continues."""
    part = prompts()[2 * rank : 2 * rank + 2]
    part.meta_info["eos_token_id"] = list(range(VOCABULARY)) if rank else None
    made = rollout(RefineRollout)
    made.bind_actor(make_engine(path), policy=None)
    samples = made.generate_sequences(part).batch
    return samples["response_mask"].sum(-1).numpy(), samples["responses"].numpy()


@pytest.mark.process
@pytest.mark.slow
def test_ranks_of_a_sharded_model_do_not_wait_for_each_other(tmp_path):
    model = tiny("llama", seed=1)
    model.config.update({WINDOW_KEY: 5, NOISE_KEY: 3})
    model.save_pretrained(tmp_path)
    results = run_ranks(on_ranks, 2, str(tmp_path))
    expected = rollout(HFRollout).generate_sequences(prompts(eos_token_id=None)).batch["responses"]
    for rank, (lengths, responses) in enumerate(results):
        assert lengths.tolist() == [1 if rank else LIMIT] * 6
        length = 1 if rank else LIMIT
        assert (responses[:, :length] == expected[6 * rank : 6 * rank + 6, :length].numpy()).all()


def test_lenient_samples_have_the_distribution_that_their_log_probs_state():
    """The first token is the policy's; the second was drafted after a noise token, then verified."""
    lenience, n = 2.5, 4000
    made = rollout(RefineRollout, custom={"mode": "verify", "window": 2, "lenience": lenience}, response_length=3)
    model = made.engine.module
    model.lm_head.weight.data *= 0.2  # flatter, so that every token occurs
    batch = prompts(n=n, eos_token_id=None)[:1]
    out = made.generate_sequences(batch).batch
    prompt = batch.batch["input_ids"][0]
    with torch.no_grad():
        first = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
        draft = model(input_ids=torch.cat([prompt, torch.tensor([3])])[None]).logits[0, -1].softmax(-1)
        after = torch.stack([torch.cat([prompt, torch.tensor([token])]) for token in range(VOCABULARY)])
        target = model(input_ids=after).logits[:, -1].softmax(-1)  # [first token, second token]
    behaviour = LenientAcceptance.of(target, draft.expand_as(target), lenience).behaviour
    behaviour[3] = target[3]  # after the noise token itself the second token was drawn with the right context
    one, two, _ = out["responses"].T
    expected = torch.stack([first[one].log(), behaviour[one, two].log()], 1)
    torch.testing.assert_close(out["rollout_log_probs"][:, :2], expected, atol=1e-4, rtol=0)
    mean, counts = n * (first[:, None] * behaviour).sum(0), torch.bincount(two, minlength=VOCABULARY)
    assert mean.min() > 5
    chi_squared = ((counts - mean) ** 2 / mean).sum()
    assert chi_squared < 82.7  # the 99.9 % quantile for 47 degrees of freedom
    unlike = n * (first[:, None] * target).sum(0)  # the policy's own second tokens
    assert ((counts - unlike) ** 2 / unlike).sum() > 200


@pytest.mark.parametrize("validate", [False, True])
def test_lenience_is_refused_with_filters(validate):
    def generate(**sampling):
        settings = {"val_kwargs": SamplingConfig(do_sample=True, temperature=1.0, **sampling)} if validate else sampling
        made = rollout(RefineRollout, custom={"lenience": 2.0}, **settings)
        return made.generate_sequences(prompts(validate=validate))

    section = "actor_rollout_ref.rollout" + ".val_kwargs" * validate
    needed = f"custom.lenience=2.0 needs {section}.top_k=-1 and {section}.top_p=1, not -1 and 0.9"
    with pytest.raises(ValueError, match=needed):
        generate(top_p=0.9)
    assert len(generate(top_k=-1, top_p=1)) == 12


def test_a_batch_in_parts_draws_the_same():
    expected = rollout(RefineRollout).generate_sequences(prompts()).batch["responses"]
    small = rollout(RefineRollout, max_num_seqs=6).generate_sequences(prompts()).batch["responses"]
    assert torch.equal(small, expected)


def test_rows_run_to_the_limit_with_ignore_eos():
    output = rollout(RefineRollout, ignore_eos=True).generate_sequences(prompts())
    assert output.batch["response_mask"].sum() == 12 * LIMIT


def test_the_registry_and_a_model_without_a_window():
    assert get_rollout_class("refine", "sync") is RefineRollout
    made = rollout(RefineRollout)
    made.engine.module.config.update({WINDOW_KEY: None})
    with pytest.raises(ValueError, match=r"config.json has no dllm_window.*rollout.custom.window"):
        made.generate_sequences(prompts())
    made.settings = RefineRolloutSettings(window=4)
    assert made.generate_sequences(prompts()).meta_info["metrics"]["rollout/forwards"][0] <= LIMIT + 1
    with pytest.raises(ValueError, match=r"rollout.custom.mode='slid' is unknown; did you mean 'slide'"):
        RefineRolloutSettings.from_custom({"mode": "slid"})
    with pytest.raises(ValueError, match=r"rollout.custom.windows is unknown; did you mean 'window'"):
        RefineRolloutSettings.from_custom({"windows": 4})


def rows_of(count):
    return [Row(i, [7], 1, 99) for i in range(count)]


def test_the_window_with_the_most_tokens_per_second_is_chosen():
    plain, verify = windows_of("auto", 5)[0], Window(4, 4)
    costs = ForwardCosts([1, 64], {1: [1.0, 1.0], 9: [1.5, 6.0]})
    rule = AdaptiveWindows([plain, verify], noise=3, costs=costs)
    row = rows_of(1)[0]
    rule.prepare([row])
    assert rule.window == verify and row.guesses == [3] * 8
    # Nothing was drafted before, so this forward does not count.
    assert rule.step(row, [5, 6, 7, 8, 9, 10, 11, 12, 13], None) == [5] and row.guesses == [6, 7, 8, 9, 10, 11, 12, 13]
    rule.committed(1)
    rule.prepare([row])
    assert row.guesses == [6, 7, 8, 9, 3, 3, 3, 3]
    assert rule.step(row, [6, 7, 8, 1, 2, 4, 4, 4, 4], None) == [6, 7, 8, 1] and row.guesses == [2, 4, 4, 4, 4]
    rule.committed(4)
    assert rule.tokens_per_forward(verify) == (5 + 4) / 2  # 5 were expected at first
    # 4.5 tokens in 1.5 s beat 1 in 1 s for one row; for 64 rows they take 6 s.
    rule.prepare(rows_of(1))
    assert rule.window == verify
    rule.prepare(rows_of(64))
    assert rule.window == plain
    rule.forget()
    rule.prepare(rows_of(64))
    assert rule.window == verify and rule.counts[verify] == (4.5, 1.0)  # tried again


def test_a_window_of_too_many_tokens_is_not_tried():
    widths: list[tuple[int, int]] = []
    costs = ForwardCosts.measure(lambda rows: widths.append((len(rows), 1 + len(rows[0].guesses))), [1, 9, 9], 5, 4, 40)
    assert set(widths) == {(1, 1), (1, 9), (4, 1), (4, 9), (5, 1)} and costs.of(9, 5) == float("inf")
    assert ForwardCosts([1, 4, 16], {9: [1.0, float("inf"), float("inf")]}).of(9, 8) == float("inf")
    rule = AdaptiveWindows([Window(0), Window(4, 4)], 3, costs)
    rule.prepare(rows_of(5))
    assert rule.window == Window(0)
