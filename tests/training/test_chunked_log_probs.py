"""The chunked head against plain autograd, and the token policy that computes with it.

Not covered: CUDA, whose order of summation differs.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig

from tests.helpers.engines import make_engine
from tests.training.test_packing import grouped_batch, outputs_of
from verl.training.policy import causal_lm
from verl.training.policy.chunked_log_probs import FinalLogits, chunked_log_probs, is_plain

CONFIGS = {
    "plain": {},
    "soft cap": {"final_logit_softcapping": 2.5},
    "scaled": {"logit_scale": 0.6, "logits_scaling": 0.8},
    "all": {"final_logit_softcapping": 3.0, "logit_scale": 1.5, "logits_scaling": 0.7},
}


def problem(dtype=torch.float32, rows=11, width=6, vocabulary=13, bias=False):
    """A head, states that require a gradient, labels; the states are large enough for a soft cap to matter."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=bias).to(dtype)
    hidden = (3 * torch.randn(rows, width)).to(dtype).requires_grad_()
    return head, hidden, torch.randint(vocabulary, (rows,))


def by_autograd(head, config, temperature, hidden, labels):
    """The formula of the model families' papers with all logits in memory, in float32 at least."""
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits * config.get("logit_scale", 1.0) / config.get("logits_scaling", 1.0)
    if (cap := config.get("final_logit_softcapping")) is not None:
        logits = cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def log_probs_of(head, final, hidden, labels, **settings):
    """(log-probs [N], entropy [N]) of the chunked head."""
    return chunked_log_probs(head, final, hidden, labels, **settings)[:2]


def gradients(log_probs, entropy, head, hidden, with_entropy):
    weights = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)
    loss = (log_probs * weights).sum() + (0.3 * (entropy * weights.flip(0)).sum() if with_entropy else 0)
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


@pytest.mark.process  # the compiler
@pytest.mark.slow
def test_a_compiled_chunk_gives_the_same():
    head, hidden, labels = problem()
    final = FinalLogits.of(PretrainedConfig(**CONFIGS["all"]), temperature=1.3)
    torch._dynamo.utils.counters.clear()
    compiled = log_probs_of(head, final, hidden, labels, with_entropy=True, chunk_tokens=4, compiled=True)
    expected = by_autograd(head, CONFIGS["all"], 1.3, hidden, labels)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(gradients(*compiled, head, hidden, True), gradients(*expected, head, hidden, True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
def test_values_and_gradients_equal_those_of_full_logits(config, with_entropy, chunk_tokens):
    head, hidden, labels = problem(bias=True)
    final = FinalLogits.of(PretrainedConfig(**config), temperature=1.3)
    actual = log_probs_of(head, final, hidden, labels, with_entropy=with_entropy, chunk_tokens=chunk_tokens)
    expected = by_autograd(head, config, 1.3, hidden, labels)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1] if with_entropy else torch.zeros(11), rtol=1e-5, atol=1e-5)
    computed = (gradients(*pair, head, hidden, with_entropy) for pair in (actual, expected))
    torch.testing.assert_close(*computed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_product_is_reduced_in_float32(autocast):
    head, hidden, labels = problem(torch.float32 if autocast else torch.bfloat16, vocabulary=300)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = log_probs_of(head, FinalLogits(None, 1.0), hidden, labels, with_entropy=True, chunk_tokens=4)
        expected = by_autograd(head, {}, 1.0, hidden, labels)
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # of the same bfloat16 logits
    actual, expected = (gradients(*pair, head, hidden, True) for pair in (actual, expected))
    assert [g.dtype for g in actual] == [g.dtype for g in expected] == [hidden.dtype, head.weight.dtype]
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()  # chunks are summed in bfloat16: 8 bits


def test_a_frozen_head_gets_no_gradient_and_zero_rows_give_empty_outputs():
    head, hidden, labels = problem()
    head.requires_grad_(False)
    final = FinalLogits(None, 1.0)
    log_probs, entropy = log_probs_of(head, final, hidden, labels, with_entropy=True, chunk_tokens=4)
    (log_probs.sum() + entropy.sum()).backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0
    head.requires_grad_(True)
    log_probs, _ = log_probs_of(head, final, hidden[:0], labels[:0], with_entropy=False, chunk_tokens=4)
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and (head.weight.grad == 0).all()


@pytest.mark.parametrize("rows", [0, 11])
@pytest.mark.parametrize("with_grad", [True, False])
def test_argmax_comes_with_the_log_probs_of_any_head(rows, with_grad):
    head, hidden, labels = problem(bias=True)
    hidden, labels, final = hidden[:rows], labels[:rows], FinalLogits(None, 0.5)
    with torch.set_grad_enabled(with_grad):
        actual = chunked_log_probs(head, final, hidden, labels, chunk_tokens=4, with_argmax=True)
    expected = chunked_log_probs(head, final, hidden, labels, chunk_tokens=4)
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual.argmax, head(hidden).argmax(-1))
    assert actual.argmax.shape == actual.entropy.shape == (rows,)
    assert not expected.argmax.any() and actual.log_probs.requires_grad == with_grad
    if with_grad:
        a, b = (torch.autograd.grad(out.log_probs.sum(), [hidden, head.weight]) for out in (actual, expected))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_tensor_is_larger_than_a_chunks_logits():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = out if isinstance(out, tuple | list) else (out,)
            self.numel = max([self.numel, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
            return out

    head, hidden, labels = problem(rows=640, vocabulary=500)
    with Largest() as seen:
        actual = log_probs_of(head, FinalLogits(None, 0.5), hidden, labels, with_entropy=True, chunk_tokens=10)
        gradients(*actual, head, hidden, True)
    assert seen.numel == 10 * 500  # the head's gradient is smaller: 6 * 500


def text_batch():
    """Prompts padded on the left, responses on the right: row i has i pads before and after."""
    return grouped_batch([4, 3, 2], [[5], [4], [3]], prompt=4, response=5)


CHUNKED = {"temperature": 0.7, "chunk_tokens": 2}


def slow_reference(model, batch, temperature):
    """Full logits, log_softmax, gather: log-probs and entropy [B, R], zero at padding."""
    length = batch["responses"].shape[1]
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits[:, -length - 1 : -1]
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    mask = batch["attention_mask"][:, -length:]
    return log_p.gather(-1, batch["responses"][..., None])[..., 0] * mask, -(log_p.exp() * log_p).sum(-1) * mask


def assert_that_of_full_logits(model, batch, mask=1):
    """The chunked log-probs, entropies and gradients; `mask`: 1 or [B, R], where a token counts."""
    actual = outputs_of(model, batch, **CHUNKED)
    model.zero_grad()
    log_probs, entropy = (column * mask for column in slow_reference(model, batch, 0.7))
    (log_probs * torch.linspace(-1, 1, 15).reshape(3, 5) + 0.3 * entropy).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(actual, [log_probs.detach(), entropy.detach(), *gradients], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_policy_agrees_with_full_logits_also_where_some_tokens_only_count(tiny_llama, counted, tied):
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    assert is_plain(model.lm_head)
    batch, mask = text_batch(), torch.ones(3, 5)
    if counted:
        mask[:, ::2] = 0
        batch["counted"] = mask
    assert_that_of_full_logits(model, batch, mask)


def adapted(model):
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    torch.nn.init.normal_(made.get_base_model().lm_head.lora_B.default.weight, std=0.1)
    return made


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return model


@pytest.mark.parametrize("change", [adapted, hooked])
def test_a_head_that_does_more_than_its_product_keeps_doing_it(tiny_llama, change):
    model = change(LlamaForCausalLM.from_pretrained(tiny_llama))
    assert not is_plain(causal_lm.causal_model(model).get_output_embeddings())
    assert_that_of_full_logits(model, text_batch())


@pytest.mark.parametrize("wrap_policy", [{}, {"min_num_params": 64 * 16}])
def test_a_sharded_model_gives_the_same_with_its_head_in_the_root_and_by_itself(llama, wrap_policy):
    plain = LlamaForCausalLM.from_pretrained(llama)
    expected = outputs_of(plain, text_batch(), **CHUNKED)
    engine = make_engine(llama, engine={"wrap_policy": wrap_policy})
    actual = outputs_of(engine.module, text_batch(), **CHUNKED)
    grads = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, {n: p.grad for n, p in plain.named_parameters()}, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_heads_gradient_is_summed_over_chunks_in_float32():
    """512 chunks of equal tokens: in bfloat16 the sum of the weight's gradient would stop growing at 256 of them."""
    torch.manual_seed(0)
    head = nn.Linear(4, 6, bias=False).to(torch.bfloat16)
    hidden, labels = torch.ones(512, 4, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int64)
    gradients = []
    for chunk in (1, 512):
        head.weight.grad = None
        chunked_log_probs(head, FinalLogits(None, 1.0), hidden, labels, chunk_tokens=chunk).log_probs.sum().backward()
        gradients.append(head.weight.grad.float())
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(*gradients, rtol=2**-7, atol=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_second_backward_pass_gives_the_same_gradients(config):
    """The first one overwrites the last chunk's logits with a gradient."""
    head, hidden, labels = problem()
    final = FinalLogits.of(PretrainedConfig(**config))
    actual = log_probs_of(head, final, hidden, labels, with_entropy=True, chunk_tokens=4)
    loss = actual[0].sum() + 0.3 * actual[1].sum()
    first, second = (torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
