"""A run's checkpoint folder: on nodes that do not share it, and its copy in another place."""

import os
import pathlib

import pytest
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.run.checkpoints import Checkpoints
from verl.trainer.run.prompt_stream import PromptStream
from verl.training.checkpoint.publish import verify_manifest


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
    checkpoints(folder, shared=False, save_freq=0)
    checkpoints(folder, shared=False, nnodes=1)
    assert list(folder.iterdir()) == []


def test_a_published_checkpoint_is_copied_to_the_remote_folder(tmp_path):
    class Part:
        def save_checkpoint(self, local_path, *args):
            pathlib.Path(local_path).mkdir()
            (pathlib.Path(local_path) / "weights").write_text("w")

    remote = tmp_path / "remote"
    settings = {"default_local_dir": str(tmp_path / "run"), "save_freq": 1, "nnodes": 1}
    rows = [{"x": i} for i in range(4)]
    state = {"counters": {}, "best": {}, "kl_controller": {}, "variant": {}}

    def saved(default_hdfs_dir):
        trainer = OmegaConf.create(settings | {"default_hdfs_dir": str(default_hdfs_dir)})
        stream = PromptStream(StatefulDataLoader(rows, batch_size=2))
        Checkpoints(trainer, {"actor": Part()}, stream, {}, None).save(1, **state)

    saved(remote)
    assert (remote / "latest_checkpointed_iteration.txt").read_text() == "1"
    verify_manifest(remote / "global_step_1")
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(RuntimeError, match="trainer.default_hdfs_dir=.*global_step_1 could not be copied there"):
        saved(blocked)
