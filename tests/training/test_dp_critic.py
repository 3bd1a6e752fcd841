"""The critic: values read one position to the left, the loss, learning; cuts and ranks are in test_cuts.py."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.helpers.engines import make_engine, rl_batch
from verl.config.model import PluginConfig
from verl.training.critic import DataParallelPPOCritic
from verl.workers.config import FSDPCriticConfig


def critic(path, mini=8, lr=1e-3, packs=False, **config):
    engine = make_engine(path, lr=lr, loader=PluginConfig(name="value_head"), use_remove_padding=packs)
    sizes = {"ppo_mini_batch_size": mini, "ppo_micro_batch_size_per_gpu": 8, "forward_micro_batch_size_per_gpu": 8}
    return DataParallelPPOCritic(FSDPCriticConfig(**{**sizes, **config}), engine)


def value_batch(made, rows=8):
    data = rl_batch(rows=rows)
    data.batch["values"] = made.compute_values(data)
    generator = torch.Generator().manual_seed(7)
    data.batch["returns"] = torch.randn(data.batch["values"].shape, generator=generator)
    return data


@pytest.mark.parametrize("cut", [{}, {"forward_micro_batch_size_per_gpu": 3},
                                 {"forward_micro_batch_size_per_gpu": 3, "packs": True},
                                 {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 20}])  # fmt: skip
def test_values_stand_in_front_of_their_tokens_however_rows_are_cut(tiny_llama, cut):
    made, data = critic(tiny_llama, **cut), rl_batch()
    values = made.compute_values(data)
    model = made.engine.module.eval()
    batch = data.batch
    with torch.no_grad():
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs).logits[..., 0]
    length = batch["responses"].shape[1]
    expected = torch.stack([logits[:, -length - 1 + t] for t in range(length)], 1) * batch["response_mask"]
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert AutoModelForTokenClassification.from_pretrained(tiny_llama, num_labels=1).score.weight.shape == (1, 64)


def test_the_loss_is_half_the_clipped_square(tiny_llama):
    made = critic(tiny_llama, cliprange_value=0.1)
    data = value_batch(made)
    values, returns, mask = (data.batch[key] for key in ("values", "returns", "response_mask"))
    data.batch["values"] = old = values + torch.where(torch.arange(values.shape[1]) % 2 == 0, 0.5, 0.0)
    near = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
    expected = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)[mask.bool()].mean().item()
    metrics = made.update_critic(data)
    assert metrics["critic/vf_loss"][0] == pytest.approx(expected, rel=1e-4)
    clipped = ((near - returns) ** 2 > (values - returns) ** 2)[mask.bool()].float().mean().item()
    assert metrics["critic/vf_clipfrac"][0] == pytest.approx(clipped, rel=1e-5) and clipped > 0
    assert metrics["critic/vpred_mean"][0] == pytest.approx(values[mask.bool()].mean().item(), rel=1e-4)


def test_values_come_near_to_the_returns(tiny_llama):
    made = critic(tiny_llama, lr=3e-3, cliprange_value=10.0)
    data = value_batch(made)
    losses = [made.update_critic(data)["critic/vf_loss"][0] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
