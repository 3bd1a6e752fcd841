"""Attention on segments: every backend that runs here against the padded form, in float32 and bfloat16, with gradients.

The CUDA kernels do not run on a CPU: what they are called with is checked by a kernel in plain PyTorch that does what
their documentation says. `make gpu-check` compares the kernels themselves.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM

from tests.training.test_packing import grouped_batch, llama
from verl.training.policy import attention, get_policy
from verl.training.policy.attention import BACKENDS, choose_backend, make_packable, segment_attention
from verl.training.policy.packing import ON_HOST, pack, pack_batch, to_device
from verl.training.policy.prefix_tree import prefix_tree


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


def documented_kernel(q, k, v, query_ends, key_ends, most_queries, most_keys, scale, dropout, window, cap):
    """Flash attention's contract, in float32, a segment at a time: causal, aligned to the last query and key."""
    outputs = []
    for queries, seen in _segments(q, k, query_ends, key_ends, most_queries, most_keys):
        own = q[queries].float()
        kk, vv = (x[seen].float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", own, kk) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        ahead = torch.arange(len(kk)) - (torch.arange(len(own))[:, None] + len(kk) - len(own))  # of a query's own key
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vv))
    return torch.cat(outputs).to(q.dtype)


def _segments(q, k, query_ends, key_ends, most_queries, most_keys):
    """The segments' slices of queries and keys, checked as the kernels' documentation states them."""
    queries, keys = query_ends.tolist(), key_ends.tolist()
    assert max(b - a for a, b in zip(queries, queries[1:], strict=False)) == most_queries
    assert max(b - a for a, b in zip(keys, keys[1:], strict=False)) == most_keys
    assert (queries[-1], keys[-1]) == (len(q), len(k))
    for i in range(len(queries) - 1):
        yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def _heads_first(x, heads):
    """[T, h, D] -> [1, heads, T, D], key heads repeated."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1).unsqueeze(0)


def cpu_flash_forward(q, k, v, *segments_causal_scale):
    """PyTorch's flash attention for CPUs, a segment at a time."""
    *segments, causal, scale = segments_causal_scale
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for own, seen in _segments(q, k, *segments):
        states = (_heads_first(x, q.shape[1]) for x in (q[own], k[seen], v[seen]))
        o, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, causal, scale=scale)
        out[own], lse[:, own] = o[0].transpose(0, 1), log[0]
    return out, lse


def cpu_flash_backward(gradient, q, k, v, out, lse, *segments_causal_scale):
    *segments, causal, scale = segments_causal_scale
    totals = [torch.zeros_like(x) for x in (q, k, v)]
    for own, seen in _segments(q, k, *segments):
        states = (_heads_first(x, q.shape[1]) for x in (gradient[own], q[own], k[seen], v[seen], out[own]))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *states, lse[None, :, own].contiguous(), 0.0, causal, scale=scale
        )
        for total, index, part in zip(totals, (own, seen, seen), parts, strict=True):
            part = part[0].transpose(0, 1)
            total[index] = part.reshape(len(part), total.shape[1], -1, part.shape[2]).sum(2)
    return tuple(totals)


shared_prompts = attention.shared_prompt_attention(attention.MergingKernel(cpu_flash_forward, cpu_flash_backward))


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (1, None), (None, 0.5), (3, 0.5)])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_segments_give_what_padded_classes_give(monkeypatch, share, dtype, tolerance, window, cap):
    """4 query heads on 2 key heads, which a GPU gets repeated. bfloat16: inputs and outputs are rounded to 8 bits."""
    batch = grouped_batch([6, 3, 1, 5], [[5, 0, 2], [1, 4], [3], [0]])
    packing = pack(batch["attention_mask"], 5, prefix_tree(batch, 5) if share else None)
    tokens, generator = len(packing.tokens), torch.Generator().manual_seed(0)
    results, sdpa = {}, BACKENDS["sdpa"]
    monkeypatch.setattr(attention, "SCORES_AT_A_TIME", 200)  # a few queries at a time
    on_cuda = lambda query, *rest: sdpa(query.as_subclass(OnCuda), *rest).as_subclass(torch.Tensor)  # noqa: E731
    backends = {"sdpa": sdpa, "on cuda": on_cuda, "segments": segment_attention(documented_kernel)}
    if share and window is None and cap is None:
        backends["merged"] = shared_prompts
    for name, backend in backends.items():
        generator.manual_seed(0)
        shapes = ((1, 4, tokens, 16), (1, 2, tokens, 16), (1, 2, tokens, 16))
        states = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
        out = backend(*states, packing, 0.25, 0.0, window, cap)
        assert out.shape == (tokens, 4, 16) and out.dtype == dtype
        (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results[name] = [out.detach().float(), *(x.grad.float() for x in states)]
    for other in results.values():
        torch.testing.assert_close(other, results["sdpa"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kernel", "share"), [("varlen", False), ("varlen", True), ("shared_prompt", True)])
def test_a_model_on_a_segment_kernel_gives_the_same_log_probs_and_gradients(monkeypatch, kernel, share):
    batch, results = grouped_batch([6, 3, 1], [[5, 0, 2], [1, 4], [3]]), []
    monkeypatch.setitem(BACKENDS, "varlen", segment_attention(documented_kernel))
    monkeypatch.setitem(BACKENDS, "shared_prompt", shared_prompts)
    for backend in ("sdpa", kernel):
        monkeypatch.setattr(attention, "choose_backend", lambda *_, chosen=backend: chosen)
        torch.manual_seed(0)
        model, policy = llama(), get_policy("causal_lm")
        policy.set_forward(remove_padding=True, share_prompt=share)
        policy.compared = True  # one of the kernels cannot compute rows that share no prompt
        log_probs, _ = policy.log_probs(model, batch, temperature=1.0, with_entropy=False)
        log_probs.mean().backward()
        results.append([log_probs.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_kernels_are_chosen_by_device_type_and_packages(monkeypatch):
    batch = grouped_batch([6], [[5]])
    packing = pack(batch["attention_mask"], 5)
    half = torch.zeros(1, dtype=torch.bfloat16).as_subclass(OnCuda)
    assert choose_backend(*[torch.zeros(1, dtype=torch.bfloat16)] * 2, packing, 0.0) == "sdpa"
    assert choose_backend(*[torch.zeros(1).as_subclass(OnCuda)] * 2, packing, 0.0) == "sdpa"  # float32
    for installed, dropout, expected in ((False, 0.0, "varlen"), (False, 0.1, "sdpa"), (True, 0.1, "flash_attn")):
        monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda there=installed: there)
        assert choose_backend(half, half, packing, dropout) == expected
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    shared = grouped_batch([6, 3], [[5, 2], [1]])
    packing = pack(shared["attention_mask"], 5, prefix_tree(shared, 5))
    assert choose_backend(half, half, packing, 0.0) == "shared_prompt"
    assert choose_backend(half, half, packing, 0.1) == "flash_attn"
    wide, latent = (torch.zeros(1, 1, 1, size, dtype=torch.bfloat16).as_subclass(OnCuda) for size in (320, 192))
    assert choose_backend(wide, wide, packing, 0.0) == "sdpa"
    assert choose_backend(latent, latent[..., :128], packing, 0.0) == "sdpa"  # multi-head latent attention
    assert choose_backend(latent, latent, packing, 0.0) == "shared_prompt"
    assert choose_backend(half, half, packing, 0.0, 4) == "flash_attn"  # a prompt of its own pass has no window
    assert choose_backend(half, half, packing, 0.0, None, 50.0) == "flash_attn"
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    assert choose_backend(half, half, packing, 0.0, 4) == "varlen"
    assert choose_backend(half, half, packing, 0.0, 4, 50.0) == "sdpa"
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    alone = grouped_batch([6, 3], [[5], [1]])  # a copy of each prompt's keys is what it has anyway
    assert choose_backend(half, half, pack(alone["attention_mask"], 5, prefix_tree(alone, 5)), 0.0) == "flash_attn"


@pytest.mark.parametrize("window", [None, 4])
def test_the_cuda_kernels_get_windows_and_soft_caps_as_they_count_them(monkeypatch, window):
    """Both take the number of keys before a query's own; of flash-attn and torch only the first has soft caps."""
    calls = []
    record = lambda *args, **options: calls.append(options)  # noqa: E731
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=record))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", record)
    packing = pack(grouped_batch([6], [[5]])["attention_mask"], 5)
    states = [torch.zeros(1, 2, 11, 4)] * 3
    BACKENDS["flash_attn"](*states, packing, 0.5, 0.0, window, 30.0)
    BACKENDS["flash_attn"](*states, packing, 0.5, 0.0, window)
    BACKENDS["varlen"](*states, packing, 0.5, 0.0, window)
    before = {None: -1, 4: 3}[window]
    assert [call["window_size"] for call in calls] == [(before, -1 if window is None else 0)] * 2 + [(before, 0)]
    assert [call.get("softcap") for call in calls] == [30.0, 0.0, None] and calls[0]["causal"]


def test_flash_attention_without_a_packing_is_asked_for_by_its_own_name(monkeypatch):
    """As a rollout that generates with the actor's module does."""
    calls = []

    def kernel(query, key, value, *args, attn_implementation, is_causal, layer_idx, target_dtype, **kwargs):
        calls.append((attn_implementation, is_causal, layer_idx, target_dtype))
        return query

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", kernel)
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    assert make_packable(model)
    model(torch.tensor([[5, 6, 7]]))
    layers = range(model.config.num_hidden_layers)
    assert calls == [("flash_attention_2", True, layer, torch.float32) for layer in layers]


def test_models_with_attention_sinks_keep_their_own_attention():
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
                 num_key_value_heads=1, num_local_experts=2, vocab_size=64, pad_token_id=0)  # fmt: skip
    model = GptOssForCausalLM(GptOssConfig(**sizes))
    before = model.config._attn_implementation
    assert not make_packable(model) and model.config._attn_implementation == before
    with pytest.raises(ValueError, match="the attention of GptOssForCausalLM cannot be replaced"):
        make_packable(model, shared=True)


def test_a_users_flash_attention_stays_for_padded_batches():
    model = llama()
    model.config._attn_implementation = "flash_attention_2"  # the package is not needed to switch from it
    assert make_packable(model) and model.config._attn_implementation == attention.NAME_OF_FLASH
    other = llama()
    assert make_packable(other) and other.config._attn_implementation == attention.NAME
    assert isinstance(other, LlamaForCausalLM)


def test_the_layout_is_made_without_a_look_at_the_device():
    """Values of tensors on the meta device cannot be read at all."""
    batch = grouped_batch([6, 3], [[5, 0, 2], [1, 4]])
    batch["counted"] = (torch.arange(25).view(5, 5) % 3 != 0).long()
    there = to_device(batch, torch.device("meta"))
    assert batch["input_ids"].device.type == "cpu" and there["input_ids"].is_meta and ON_HOST in there.keys()
    for share in (False, True):
        packing, here = (pack_batch(b, 5, share_prompt=share) for b in (there, batch))
        assert packing.tokens.is_meta and packing.tokens.shape == here.tokens.shape
        assert packing.segments.query_ends.is_meta and packing.segments[2:] == here.segments[2:]
        assert torch.equal(packing.lengths, here.lengths) and len(packing.response_index) == len(here.response_index)
        kept = batch["attention_mask"][:, 6:].bool() & batch["counted"].bool()
        assert torch.equal(here.scatter_to_responses(torch.ones(len(here.response_index)), kept.shape), kept.float())
    assert isinstance(there, TensorDict)
