"""More nodes than Ray has: an error for GPU ranks, a warning for CPU ranks."""

import pytest

from tests.helpers.logs import logged
from verl.trainer.ppo import worker_groups
from verl.trainer.ppo.worker_groups import ResourcePoolManager


@pytest.fixture
def one_node(monkeypatch):
    monkeypatch.setattr(worker_groups.ray, "available_resources", lambda: {"GPU": 8.0, "CPU": 8.0})
    monkeypatch.setattr(worker_groups.ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])


@pytest.mark.usefixtures("one_node")
def test_gpu_ranks_of_two_nodes_need_two_nodes():
    with pytest.raises(ValueError, match=r"trainer.nnodes=2, but Ray has 1 node\. Start Ray on each node"):
        ResourcePoolManager({"pool": [4, 4]}, {}).create_resource_pool()
    with pytest.raises(ValueError, match=r"^reward_model.nnodes=2, but .* or set reward_model.nnodes=1\."):
        ResourcePoolManager({"global_pool": [4], "reward_pool": [1, 1]}, {}).create_resource_pool()
    keys = "trainer.nnodes x trainer.n_gpus_per_node"
    for spec, named in (({"pool": [9]}, f"{keys} requests 9 GPU"),
                        ({"global_pool": [8], "reward_pool": [1]}, f"{keys} and reward_model.nnodes x "
                         "reward_model.n_gpus_per_node request 9 GPU")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{named} ranks, but Ray has 8 GPUs free; set trainer.device=cpu"):
            ResourcePoolManager(spec, {}).create_resource_pool()
    manager = ResourcePoolManager({"pool": [8]}, {})
    manager.create_resource_pool()
    assert manager.resource_pool_dict["pool"].world_size == 8


@pytest.mark.usefixtures("one_node")
def test_cpu_ranks_of_two_nodes_run_on_one_with_a_warning():
    with logged() as lines:
        ResourcePoolManager({"pool": [1, 1]}, {}, use_gpu=False).create_resource_pool()
    assert "trainer.nnodes=2, but Ray has 1 node." in lines[0] and "the CPU ranks of all 2 run on 1" in lines[0]
