"""The same models sharded over two ranks by FSDP2, and in vLLM on the CPU."""

import pytest
import torch

from tests.helpers.engines import make_engine
from tests.helpers.ranks import run_ranks
from tests.models.checks import LIMIT, PADDED, REFUSED, WORKS, batch, plain_log_probs, stored
from tests.models.families import FAMILIES, model_of
from tests.models.in_vllm import observed_in_vllm
from verl.training.policy import get_policy

pytestmark = [pytest.mark.long, pytest.mark.process]


def sharded(rank, world_size, folders):
    """Log-probs [4, 12] of each family's default layout, and whether that is a flat row; None for a refused one."""
    results = {}
    for name, folder in folders.items():
        engine, policy = make_engine(folder, optim=False, engine={"fsdp_size": world_size}), get_policy("causal_lm")
        policy.set_forward(remove_padding=True, share_prompt=True)
        with engine.eval_mode(), torch.no_grad():
            policy.bind(engine.module)
            try:
                policy.compare_layouts(engine.module, torch.device("cpu"))
            except ValueError:
                results[name] = None  # on every rank: the comparison is collective
                continue
            log_probs, _ = policy.log_probs(engine.module, batch(), temperature=1.0, with_entropy=False)
        results[name] = log_probs.numpy(), policy.share_prompt
    return results


def test_families_sharded_over_two_ranks_give_the_log_probs_of_one(tmp_path):
    folders = {name: str(tmp_path / name) for name in FAMILIES}
    for name, folder in folders.items():
        model_of(name).save_pretrained(folder)
    table = stored()
    for results in run_ranks(sharded, 2, folders):
        assert {name for name, result in results.items() if result is None} == {
            name for name, row in table.items() if row["flat rows"] == REFUSED
        }
        for name, (log_probs, flat) in ((name, result) for name, result in results.items() if result is not None):
            expected = plain_log_probs(model_of(name), batch())
            assert (torch.from_numpy(log_probs) - expected).abs().max() < LIMIT, name
            assert (WORKS if flat else PADDED) == table[name]["flat rows"], name


@pytest.mark.parametrize("name", ["Llama, tied", "Gemma 2", "Mixtral", "OLMo 2"])
def test_a_family_in_vllm_does_what_the_table_says(name):
    """All families are compared by `python -m tests.models`."""
    assert observed_in_vllm(name).items() <= stored()[name].items()
