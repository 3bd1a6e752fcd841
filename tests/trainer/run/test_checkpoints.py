"""A run's checkpoint folder on nodes that do not share it."""

import os

import pytest
from omegaconf import OmegaConf

from verl.trainer.run.checkpoints import Checkpoints


class OnTwoNodes:
    """A worker group whose second node has a folder of its own, or shares the first one's."""

    def __init__(self, shared):
        self.shared = shared

    def nodes_that_see(self, path):
        ranks = [("first", os.path.exists(path)), ("second", self.shared and os.path.exists(path))]
        return [ranks, ranks]  # each rank answers for all


def checkpoints(folder, shared, **trainer):
    settings = {"default_local_dir": str(folder), "save_freq": 2, "nnodes": 2, **trainer}
    return Checkpoints(OmegaConf.create(settings), {"actor": OnTwoNodes(shared)}, None, {}, None)


def test_a_folder_that_a_node_does_not_see_is_refused_before_the_first_save(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="default_local_dir=.*run.* is not the same folder on every node: second can"):
        checkpoints(folder, shared=False)
    checkpoints(folder, shared=True)
    assert list(folder.iterdir()) == []


def test_a_run_that_saves_nothing_needs_no_shared_folder(tmp_path):
    checkpoints(tmp_path, shared=False, save_freq=0)
    checkpoints(tmp_path, shared=False, nnodes=1)
