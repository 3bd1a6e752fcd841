"""Prefixes that rows share, forwarded once: the log-probs, entropies and gradients of rows by themselves."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.training.test_attention import OnCuda, documented_kernel, shared_prompts
from tests.training.test_packing import gemma, llama, outputs_of, qwen, windows
from verl.protocol import DataProto
from verl.protocol.sampling_mask import SAMPLING_MASK
from verl.trainer.ppo import batching
from verl.training.actor.batch_cuts import micro_batches
from verl.training.policy import attention, get_policy, prefix_tree
from verl.training.policy.attention import BACKENDS, segment_attention
from verl.training.policy.packing import pack, pack_batch
from verl.training.policy.prefix_tree import SHORTEST_GAIN

P, R = 9, 8


def rows_batch(rows, groups, prompt=P, response=R) -> TensorDict:
    """rows: lists of (prompt ids, response ids)."""
    ids = torch.zeros(len(rows), prompt + response, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (asked, answered) in enumerate(rows):
        kept = slice(prompt - len(asked), prompt + len(answered))
        ids[row, kept], mask[row, kept] = torch.tensor([*asked, *answered]), 1
    return TensorDict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
         "responses": ids[:, prompt:], "group_index": torch.tensor(groups)}, batch_size=len(rows),
    )  # fmt: skip


def random_tree(seed: int) -> TensorDict:
    """Two or three groups of rows that branch from earlier rows anywhere; prompts end anywhere, some rows are equal."""
    source, rows, groups = random.Random(seed), [], []
    for group in range(source.randint(2, 3)):
        tokens = []
        for _ in range(source.randint(1, 5)):
            start = source.choice(tokens) if tokens else []
            start = start[: source.randint(0, len(start))]
            more = source.choices(range(5, 40), k=source.randint(0 if start else 1, P + R - len(start)))
            tokens.append(start + more)
            longest, shortest = min(P, len(tokens[-1])), max(1, len(tokens[-1]) - R)
            split = source.randint(shortest, longest)
            rows.append((tokens[-1][:split], tokens[-1][split:]))
            groups.append(group)
    batch = rows_batch(rows, groups)
    if seed % 2:
        batch["counted"] = torch.rand(len(rows), R, generator=torch.Generator().manual_seed(seed)) < 0.7
    return batch


def distinct_prefixes(batch) -> int:
    """Tokens of the batch, where those with equal tokens before them in a row of their group count once."""
    seen = set()
    for ids, mask, group in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["group_index"], strict=True):
        row = ids[mask].tolist()
        seen |= {(int(group), *row[:end]) for end in range(1, len(row) + 1)}
    return len(seen)


@pytest.fixture
def any_length(monkeypatch):
    """Nodes may have a single token."""
    monkeypatch.setattr(prefix_tree, "SHORTEST_GAIN", 1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [llama, qwen, windows, gemma])
def test_trees_have_the_log_probs_entropies_and_gradients_of_separate_rows(any_length, make, seed):
    torch.manual_seed(0)
    model, batch = make().train(), random_tree(seed)
    separate = outputs_of(model, batch, remove_padding=True)
    torch.testing.assert_close(outputs_of(model, batch, share_prompt=True), separate, rtol=1e-4, atol=1e-5)
    policy = get_policy("causal_lm")
    policy.set_forward(remove_padding=True, share_prompt=True)
    packing = pack_batch(batch, R, share_prompt=True)
    assert policy.forward_tokens(batch) == len(packing.tokens) == distinct_prefixes(batch)


def rms_norm(module, hidden_states):
    """The norm in the type of its input."""
    return F.rms_norm(hidden_states, hidden_states.shape[-1:], module.weight, module.variance_epsilon)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_trees_in_float64(any_length, monkeypatch, seed):
    """The norms of transformers compute in float32, and log-probs are float32 whose weights here add up exactly."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm)
    torch.manual_seed(0)
    model, batch, gradients = llama().double(), random_tree(seed), []
    for forward in ({"remove_padding": True}, {"share_prompt": True}):
        policy = get_policy("causal_lm")
        policy.set_forward(**{"remove_padding": False, "share_prompt": False, **forward})
        model.zero_grad()
        log_probs, entropy = policy.log_probs(model, batch, temperature=1.0, with_entropy=True)
        weights = torch.arange(log_probs.numel()).view_as(log_probs) % 8 - 3.0
        (log_probs * weights + 0.25 * entropy).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    separate, shared = gradients
    assert separate.dtype == torch.float64 and separate.norm() > 1
    assert (shared - separate).norm() <= 1e-10 * separate.norm()


@settings(max_examples=125)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 6]), st.booleans())
def test_any_batch_is_packed_with_the_keys_of_each_row(seed, shortest, share):
    batch = random_tree(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "SHORTEST_GAIN", shortest)
        packing = pack_batch(batch, R, share_prompt=share)
    attended = batch["attention_mask"].bool()
    ids = packing.flat(batch["input_ids"])[0]
    assert torch.equal(ids[packing.places[attended]], batch["input_ids"][attended])
    assert len(packing.tokens) == int(packing.lengths[:, 0].sum()) == len(packing.restore)
    counted = attended[:, P:] & batch["counted"] if "counted" in batch.keys() else attended[:, P:]
    numbers = torch.arange(1, len(packing.response_index) + 1)
    placed = packing.scatter_to_responses(numbers.float(), counted.shape).long()
    assert torch.equal(placed > 0, counted)
    labels = batch["responses"].flatten()[packing.response_index]
    assert torch.equal(labels[placed[counted] - 1], batch["responses"][counted])
    before = packing.places[:, P - 1 : -1][counted]
    assert torch.equal(packing.predicted_from[placed[counted] - 1], before)
    if packing.parents is not None:  # the keys of a node are all tokens before it in a row, and its own
        paths = {tuple(row[mask].tolist()) for row, mask in zip(packing.places, attended, strict=True)}
        prefixes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        ends = packing.lengths[:, 1].cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        assert {tuple(packing.keys[a:b].tolist()) for a, b in zip(starts, ends, strict=True)} <= prefixes


@pytest.mark.parametrize("seed", range(6))
def test_every_kernel_reads_a_tree(any_length, seed):
    """Copied keys, and passes over the ancestors of each depth."""
    batch = random_tree(seed)
    packing = pack_batch(batch, R, share_prompt=True)
    backends = {"sdpa": BACKENDS["sdpa"], "segments": segment_attention(documented_kernel), "merged": shared_prompts}
    if packing.parents is None:
        del backends["merged"]
    results = {}
    for name, backend in backends.items():
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(1, heads, len(packing.tokens), 16, generator=generator).requires_grad_()
                  for heads in (4, 2, 2)]  # fmt: skip
        out = backend(*states, packing, 0.25, 0.0)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results[name] = [out.detach(), *(x.grad for x in states)]
    for other in results.values():
        torch.testing.assert_close(other, results["sdpa"], rtol=1e-5, atol=1e-5)


def test_kernels_pass_over_ancestors_where_they_are_continued_more_than_once(any_length):
    half = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16).as_subclass(OnCuda)
    branches = [([5, 6], [7, 8, 9, i]) for i in (10, 11, 12)]
    chain = [([5, 6, 7, 8, 9][: i + 1], [6 + i]) for i in range(4)]
    for rows, expected in ((branches, "shared_prompt"), (chain, "varlen")):
        packing = pack_batch(rows_batch(rows, [0] * len(rows)), R, share_prompt=True)
        assert packing.parents is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "is_flash_attn_2_available", lambda: False)
            assert attention.choose_backend(half, half, packing, 0.0) == expected


def test_a_short_prefix_is_no_node_but_an_equal_prompt_is():
    long = list(range(5, 5 + SHORTEST_GAIN))
    batch = rows_batch([([1, 2], [3, *long, 4]), ([1, 2], [3, 9]), ([1, 2], [3, *long, 5]), ([1, 2, 3], [*long, 5])],
                       [0, 0, 0, 0], 3, SHORTEST_GAIN + 2)  # fmt: skip
    tree = prefix_tree.prefix_tree(batch, SHORTEST_GAIN + 2)
    assert tree.shared.tolist() == [0, 2, SHORTEST_GAIN + 3, SHORTEST_GAIN + 3]
    assert tree.parent.tolist() == [0, 0, 0, 2]


def test_rows_of_two_groups_or_with_other_positions_share_nothing(any_length):
    batch = rows_batch([([1, 2], [3])] * 3, [0, 0, 1])
    assert prefix_tree.prefix_tree(batch, R).shared.tolist() == [0, 3, 0]
    batch["position_ids"][1] += 1
    assert prefix_tree.prefix_tree(batch, R).shared.tolist() == [0, 0, 0]
    assert prefix_tree.prefix_tree(batch[:0], R).shared.tolist() == []


def test_tokens_in_several_rows_are_predicted_once_unless_each_has_a_sampling_mask(any_length):
    batch = rows_batch([([1, 2], [3, 4, 5]), ([1, 2], [3, 4, 6])], [0, 0])
    assert [len(pack_batch(batch, R, share_prompt=share).predicted_from) for share in (False, True)] == [6, 4]
    batch[SAMPLING_MASK] = torch.zeros(2, 1)
    assert len(pack_batch(batch, R, share_prompt=True).predicted_from) == 6


def test_a_group_that_exceeds_the_limit_is_cut_between_prompts(any_length):
    rows = [([1, 2], [3, 4]), ([1, 2], [5]), ([1, 2, 3, 4, 6], [7]), ([1, 2, 3, 4, 6, 7], [8, 9])]
    data = DataProto(rows_batch(rows, [0] * 4), {}, {})
    cut = lambda **limit: [part for part, _ in micro_batches(data, whole_groups=True, **limit)]  # noqa: E731
    assert cut(rows=4, tokens=None) == [[0, 1, 2, 3]]
    assert cut(rows=3, tokens=None) == [[0, 1, 2], [3]]
    assert cut(rows=1, tokens=None) == [[0, 1], [2], [3]]  # rows with one prompt stay together
    assert cut(rows=None, tokens=9) == [[0, 1, 2, 3]]  # 4 + 1 + 2 + 2 tokens
    assert cut(rows=None, tokens=8) == [[0, 1, 2], [3]]
    assert cut(rows=None, tokens=6) == [[0, 1], [2], [3]]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_at_most_the_tokens_of_the_limit(any_length, seed):
    data = DataProto(random_tree(seed), {}, {})
    for limit in (17, 25, 40):
        parts = micro_batches(data, rows=None, tokens=limit, whole_groups=True)
        assert [row for part, _ in parts for row in part] == list(range(len(data)))
        for _, micro in parts:
            batch = micro.batch
            prompts = torch.cat([batch["input_ids"][:, :P], batch["attention_mask"][:, :P]], 1)
            assert distinct_prefixes(batch) <= limit or len(prompts.unique(dim=0)) == 1


def test_ranks_get_groups_of_about_the_same_tokens_where_shared_ones_count_once(any_length):
    """One group of equal rows of 16 tokens weighs less than one of different rows of 8."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, equal in ((16, True), (16, True), (8, False), (8, False)):
        for row in range(4):
            ids = rows[-1] if equal and row else torch.randint(5, 40, (length,), generator=generator).tolist()
            rows.append(ids)
    batch = rows_batch([(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in rows], [0] * 16)
    uid = torch.arange(16).div(4, rounding_mode="floor").numpy().astype(str).astype(object)
    data = DataProto(batch, {"uid": uid}, {})
    batching.balance(data, 4, 2, 4, whole_groups=True, by_length=True)
    assert sorted(data.non_tensor_batch["uid"][:8:4]) in (["0", "2"], ["0", "3"], ["1", "2"], ["1", "3"])


def test_a_packing_without_shared_tokens_is_that_of_rows_apart():
    batch = rows_batch([([1, 2], [3]), ([4], [5, 6])], [0, 0])
    shared, apart = pack_batch(batch, R, share_prompt=True), pack(batch["attention_mask"], R)
    assert shared.keys is shared.parents is None and torch.equal(shared.lengths, apart.lengths)
