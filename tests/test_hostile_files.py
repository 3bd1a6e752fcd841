"""Files that hide code in a pickle: at no place where files are loaded does it run, and the error is a sentence."""

import json
import os
import pickle
import shutil

import pytest
import torch

from tests.helpers.engines import make_actor, make_engine, rl_batch
from verl import DataProto
from verl.trainer.run.checkpoints import TrainerState, read_trainer_state, write_trainer_state


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return (os.mkdir, (str(self.sentinel),))


@pytest.fixture
def hostile(tmp_path):
    """(bytes of a plain hostile pickle, bytes of torch's archive around one); afterwards neither has run."""
    sentinel = tmp_path / "ran"
    torch.save({"step": Code(sentinel)}, tmp_path / "archive.pt")
    yield [pickle.dumps(Code(sentinel)), (tmp_path / "archive.pt").read_bytes()]
    assert not sentinel.exists()


@pytest.fixture(scope="module")
def checkpoint(tiny_llama, tmp_path_factory):
    """An engine with adapters, and the folder that it saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    engine = make_engine(tiny_llama, lora_rank=2)
    make_actor(engine).update_policy(rl_batch())
    engine.save_checkpoint(str(folder / "actor"))
    write_trainer_state(folder, TrainerState(1, {}, {}, {}, {}, {}), {"position": 1})
    return engine, folder


def refused(work, *names):
    """`work` ends in one sentence that holds all of the names."""
    with pytest.raises(Exception) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    for name in names:
        assert name in text, text


@pytest.mark.parametrize(
    "file", ["model/.metadata", "model/__0_0.distcp", "optim/.metadata", "optim/__0_0.distcp", "rng_rank_0.safetensors"]
)
def test_a_checkpoint_of_the_engine(checkpoint, hostile, tmp_path, file):
    engine, saved = checkpoint
    for content in hostile:
        shutil.rmtree(tmp_path / "actor", ignore_errors=True)
        shutil.copytree(saved / "actor", tmp_path / "actor")
        (tmp_path / "actor" / file).write_bytes(content)
        refused(lambda: engine.load_checkpoint(str(tmp_path / "actor")), str(tmp_path / "actor" / file.split("/")[0]))


@pytest.mark.parametrize("file", ["data.pt", "driver_rng.pt"])
def test_data_position_and_random_states_of_the_driver(checkpoint, hostile, tmp_path, file):
    for content in hostile:
        shutil.copytree(checkpoint[1], tmp_path / "step", dirs_exist_ok=True)
        (tmp_path / "step" / file).write_bytes(content)
        refused(lambda: read_trainer_state(tmp_path / "step"), file, "cannot be loaded")


def test_an_adapter(checkpoint, hostile, tiny_llama, tmp_path):
    for content in hostile:
        shutil.copytree(checkpoint[1] / "actor" / "lora_adapter", tmp_path / "adapter", dirs_exist_ok=True)
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(content)
        refused(lambda: make_engine(tiny_llama, lora_adapter_path=str(tmp_path / "adapter")), "adapter_model")
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
        (tmp_path / "adapter" / "adapter_model.bin").write_bytes(content)
        refused(lambda: make_engine(tiny_llama, lora_adapter_path=str(tmp_path / "adapter")), "adapter_model")


def test_a_models_weights(hostile, tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for content in hostile:
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(content)
        refused(lambda: make_engine(str(tmp_path / "model")), str(tmp_path / "model"))


def test_a_models_own_code_does_not_run_unasked(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config.update(model_type="mine", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        make_engine(str(tmp_path / "model"))
    assert not (tmp_path / "ran").exists()


def test_a_dump_of_a_batch(hostile, tmp_path):
    for content in hostile:
        (tmp_path / "batch.safetensors").write_bytes(content)
        refused(lambda: DataProto.load_from_disk(tmp_path / "batch.safetensors"), "batch.safetensors")
