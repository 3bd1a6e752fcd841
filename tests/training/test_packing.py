"""Batches without padding, and prompts forwarded once: the same log-probs, entropies, gradients and values."""

import pytest
import torch
from tensordict import TensorDict
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.training.policy import get_policy
from verl.training.policy.attention import make_packable
from verl.training.policy.packing import pack
from verl.training.policy.prefix_tree import prefix_tree

SHAPE = dict(vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16)  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def qwen():
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))


def grouped_batch(prompt_lengths, answer_lengths, prompt=6, response=5, seed=0) -> TensorDict:
    """Groups of rows with one prompt each: answer_lengths[g] are the lengths of group g's answers."""
    generator = torch.Generator().manual_seed(seed)
    ids, masks, groups = [], [], []
    for g, (length, answers) in enumerate(zip(prompt_lengths, answer_lengths, strict=True)):
        prompt_ids = torch.randint(5, 40, (length,), generator=generator)
        for answer in answers:
            row, mask = torch.zeros(prompt + response, dtype=torch.int64), torch.zeros(prompt + response).long()
            row[prompt - length : prompt], mask[prompt - length : prompt + answer] = prompt_ids, 1
            row[prompt : prompt + answer] = torch.randint(5, 40, (answer,), generator=generator)
            ids.append(row), masks.append(mask), groups.append(g)
    ids, mask = torch.stack(ids), torch.stack(masks)
    return TensorDict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
         "responses": ids[:, prompt:], "group_index": torch.tensor(groups)},
        batch_size=len(ids),
    )  # fmt: skip


def outputs_of(model, batch, temperature=0.8, chunk_tokens=7, **forward):
    """Log-probs and entropies, each [B, R], and the gradients that both give the trained parameters."""
    policy = get_policy("causal_lm", chunk_tokens=chunk_tokens)
    policy.set_forward(**{"remove_padding": False, "share_prompt": False, **forward})
    model.zero_grad()
    log_probs, entropy = policy.log_probs(model, batch, temperature=temperature, with_entropy=True)
    weights = torch.linspace(-1, 1, log_probs.numel()).reshape(log_probs.shape)
    (log_probs * weights + 0.3 * entropy).sum().backward()
    return [log_probs.detach(), entropy.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def windows():
    """A layer with a window of 4 tokens after one without."""
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, sliding_window=4, use_sliding_window=True, max_window_layers=1))


def gemma():
    """Windows of 4 tokens in one layer, and scores above the soft cap in both."""
    config = Gemma2Config(**SHAPE, sliding_window=4, attn_logit_softcapping=0.5, initializer_range=0.2)
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("make", [llama, qwen, windows, gemma])
@pytest.mark.parametrize("forward", [{"remove_padding": True}, {"share_prompt": True}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_entropy_and_gradients_are_those_of_padded_rows(make, forward, checkpointing):
    torch.manual_seed(0)
    model = make().train()
    batch = grouped_batch([6, 3, 1], [[5, 0, 2], [1, 4], [3]])
    plain = outputs_of(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(outputs_of(model, batch, **forward), plain, rtol=1e-4, atol=1e-5)


def test_soft_caps_are_applied_with_padding_too():
    """transformers' "sdpa" leaves them out, with which it loads these models; its "eager" and vLLM do not."""
    torch.manual_seed(0)
    model, batch = gemma().eval(), grouped_batch([6, 3, 1], [[5, 0, 2], [1, 4], [3]])
    results = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        results.append(outputs_of(model, batch))
    assert model.config._attn_implementation == "eager"  # a user's choice stays
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_plain_generation_works_with_packed_attention():
    torch.manual_seed(0)
    model = llama().eval()
    ids, mask = torch.tensor([[0, 0, 7, 9], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert make_packable(model) and make_packable(model)
    again = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(before, again)


def test_rows_without_a_prompt_and_groups_apart_are_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        pack(torch.tensor([[0, 0, 1, 1]]), 2)
    batch = grouped_batch([6, 3], [[5, 0], [1]])
    batch["group_index"] = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="not adjacent"):
        prefix_tree(batch, 5)
