"""Actor with the accept/reject policy over a model of a loader's own: shared forwards change nothing but the work."""

import numpy as np
import pytest
import torch

from tests.helpers.engines import make_engine, weights_of
from tests.training.test_policy_bernoulli import TableModel
from verl.models.loading import register_model_loader
from verl.protocol import DataProto
from verl.training.actor import DataParallelPPOActor
from verl.training.policy import get_policy
from verl.workers.config import FSDPActorConfig, PluginConfig


@register_model_loader("table_of_this_test")
def load_table(model_config, torch_dtype):
    return TableModel(gamma=2).to(torch_dtype)


def judged_blocks():
    g = torch.Generator().manual_seed(3)
    rows, gamma, width = 12, 2, 3
    ids = torch.randint(0, 16, (4, width), generator=g).repeat_interleave(3, 0)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones(rows, width + gamma, dtype=torch.long),
            "position_ids": torch.arange(width + gamma).expand(rows, -1).contiguous(),
            "spd_layout": torch.zeros(rows, 5, dtype=torch.long),
            "responses": torch.randint(0, 2, (rows, gamma), generator=g),
            "response_mask": torch.randint(0, 2, (rows, gamma), generator=g),
            "advantages": torch.randn(rows, gamma, generator=g),
            "group_index": torch.arange(4).repeat_interleave(3),
        },
        meta_info={"temperature": 0.9},
    )


def run(path, *, share, **config):
    engine = make_engine(path, loader=PluginConfig(name="table_of_this_test"))
    settings = FSDPActorConfig(ppo_mini_batch_size=12, rollout_n=3, share_prompt_forward=share, **config)
    actor = DataParallelPPOActor(settings, engine, get_policy("bernoulli", share=share))
    log_probs, _ = actor.compute_log_prob(judged_blocks())
    engine.module.rows_seen = 0
    metrics = actor.update_policy(judged_blocks())
    return log_probs, metrics, weights_of(engine), engine.module.rows_seen


@pytest.mark.parametrize(
    "cut", [dict(ppo_micro_batch_size_per_gpu=6), dict(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=10)]
)
def test_a_shared_forward_gives_the_step_of_the_plain_one_with_a_third_of_the_rows(tiny_llama, cut):
    plain = run(tiny_llama, share=False, ppo_micro_batch_size_per_gpu=12)
    shared = run(tiny_llama, share=True, **cut)
    torch.testing.assert_close(shared[0], plain[0])
    assert shared[1].keys() == plain[1].keys()
    for name, value in plain[1].items():
        assert shared[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, w in plain[2].items():
        np.testing.assert_allclose(shared[2][name], w, atol=1e-5)
    assert (plain[3], shared[3]) == (12, 4)


def test_a_model_that_cannot_write_itself_is_named_when_hf_model_is_asked_for(tiny_llama, tmp_path):
    engine = make_engine(
        tiny_llama, loader=PluginConfig(name="table_of_this_test"), contents=("model", "hf_model")
    )
    with pytest.raises(TypeError, match="TableModel.*hf_model|hf_model.*TableModel"):
        engine.save_checkpoint(str(tmp_path))
