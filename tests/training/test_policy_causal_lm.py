"""Token policy: padding, wrappers; its values and gradients are in test_chunked_log_probs.py."""

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from verl.training.policy import get_policy


def text_batch(rows=3, prompt=4, response=5, vocab=64, seed=0):
    """Prompts padded on the left, responses on the right: row i has i pads before and after."""
    torch.manual_seed(seed)
    ids = torch.randint(5, vocab, (rows, prompt + response))
    mask = torch.ones_like(ids)
    for i in range(rows):
        mask[i, :i] = 0
        mask[i, prompt + response - i :] = 0
    ids = ids * mask
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, prompt:],
        },
        batch_size=rows,
    )


def slow_reference(model, batch, temperature):
    """Full logits, log_softmax, gather: log-probs and entropy [B, R], zero at padding."""
    length = batch["responses"].shape[1]
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits[:, -length - 1 : -1]
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    mask = batch["attention_mask"][:, -length:]
    return log_p.gather(-1, batch["responses"][..., None])[..., 0] * mask, -(log_p.exp() * log_p).sum(-1) * mask


def test_padding_is_zero_and_does_not_matter(llama):
    model = LlamaForCausalLM.from_pretrained(llama)
    batch = text_batch()
    policy = get_policy("causal_lm")
    with torch.no_grad():
        log_probs, entropy = policy.log_probs(model, batch, temperature=1.0, with_entropy=False)
        assert entropy is None
        assert (log_probs[2, -2:] == 0).all() and (log_probs[0] < 0).all()
        batch["input_ids"][batch["attention_mask"] == 0] = 9
        again, _ = policy.log_probs(model, batch, temperature=1.0, with_entropy=False)
    torch.testing.assert_close(log_probs, again, rtol=1e-5, atol=1e-6)


def test_a_model_without_vocabulary_is_refused():
    with pytest.raises(TypeError, match="policy.name"):
        get_policy("causal_lm").log_probs(torch.nn.Linear(2, 2), text_batch(), temperature=1.0, with_entropy=False)
