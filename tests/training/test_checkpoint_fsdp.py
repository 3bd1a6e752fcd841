"""Engine checkpoints on one rank: resume to the bit, contents, refusals, nothing unpickled on trust."""

import json
import pickle
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from transformers import AutoModelForCausalLM

from tests.helpers.disks import leave_free, small_disk
from tests.helpers.engines import count_gathered_copies, make_actor, make_engine, rl_batch, weights_of
from tests.helpers.logs import logged
from verl.training.checkpoint import fsdp_checkpoint_manager
from verl.training.checkpoint.dcp_storage import UntrustedMetadataError, read_metadata
from verl.training.checkpoint.publish import DIGESTS


def train(engine, steps, seed=0):
    actor = make_actor(engine)
    losses = []
    for i in range(steps):
        losses += actor.update_policy(rl_batch(seed=seed + i))["actor/pg_loss"]
        engine.lr_scheduler_step()
    return losses


@pytest.mark.parametrize(
    ("model", "background"), [({}, False), ({"lora_rank": 4}, False), ({}, True)], ids=["full", "lora", "background"]
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(llama, tmp_path, model, background):
    """A save in the background has the weights of its step, whatever is trained meanwhile."""
    engine = make_engine(llama, async_save=background, contents=("model", "optimizer", "extra", "hf_model"), **model)
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=2)
    state, saved = torch.get_rng_state(), weights_of(engine)
    straight = train(engine, 2, seed=10)
    while not engine.save_is_finished():
        time.sleep(0.01)
    assert engine.save_is_finished()  # of no save that is under way

    resumed = make_engine(llama, **model)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    assert torch.equal(torch.get_rng_state(), state)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface").state_dict()
    np.testing.assert_equal(weights_of(resumed), saved)
    assert all((exported[name].numpy() == weight).all() for name, weight in saved.items())
    assert train(resumed, 2, seed=10) == straight
    np.testing.assert_equal(weights_of(resumed), weights_of(engine))
    assert resumed.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()


@pytest.mark.parametrize(
    ("model", "background"), [({}, False), ({"lora_rank": 4}, False), ({}, True)], ids=["full", "lora", "background"]
)
def test_weights_for_transformers_are_written_one_at_a_time(llama, tmp_path, monkeypatch, model, background):
    kept = count_gathered_copies(monkeypatch)
    monkeypatch.setattr(fsdp_checkpoint_manager, "SHARD_BYTES", 1)  # a file has at most the largest tensor's size
    engine = make_engine(llama, async_save=background, contents=("model", "optimizer", "extra", "hf_model"), **model)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    while not engine.save_is_finished():
        time.sleep(0.01)
    assert len(kept) > 10 and max(kept) == 0
    assert len(list((tmp_path / "huggingface").glob("model-*.safetensors"))) > 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface").state_dict()
    assert all((exported[name].numpy() == weight).all() for name, weight in weights_of(engine).items())


def test_a_save_of_weights_for_transformers_that_fails_raises(tiny_llama, tmp_path):
    engine = make_engine(tiny_llama, contents=("model", "hf_model"))
    (tmp_path / "huggingface" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="model.safetensors"):
        engine.save_checkpoint(str(tmp_path))


def test_weights_that_cannot_be_gathered_end_the_save_before_any_rank_writes(tiny_llama, tmp_path):
    """All ranks fail alike: a rank that went on to write would wait for the others."""
    engine = make_engine(tiny_llama, contents=("model", "hf_model"), lora_rank=2, target_modules=["embed_tokens"])
    with pytest.raises(TypeError, match="embed_tokens.*cannot be merged"):
        engine.save_checkpoint(str(tmp_path))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("offloads", "fused", "moments", "counters"), [
    (False, False, "meta", "cpu"), (False, True, "meta", "meta"), (True, True, "cpu", "cpu"),
])  # fmt: skip
def test_optimizer_state_is_read_to_where_the_optimizer_works(tiny_llama, tmp_path, offloads, fused, moments, counters):
    """The meta device in place of a GPU; the parameters are offloaded to the CPU."""
    engine = make_engine(tiny_llama)
    train(engine, 1)
    for group in engine.optimizer.param_groups:
        group["fused"] = fused
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    resumed = make_engine(tiny_llama)
    resumed._moves, resumed.is_optimizer_offload_enabled = True, offloads
    resumed.device_type, resumed.device = "meta", torch.device("meta")
    resumed.load_checkpoint(str(tmp_path / "actor"))
    states = resumed.optimizer.state.values()
    assert {state["exp_avg"].device.type for state in states} == {moments}
    assert {state["step"].device.type for state in states} == {counters}


def test_a_checkpoint_without_the_model_cannot_be_resumed(tiny_llama, tmp_path):
    make_engine(tiny_llama, contents=("hf_model",)).save_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="no model to resume.*path to .*huggingface if it has weights"):
        make_engine(tiny_llama).load_checkpoint(str(tmp_path))


def test_a_save_that_fails_in_the_background_raises(tiny_llama, tmp_path):
    engine = make_engine(tiny_llama, async_save=True)
    (tmp_path / "actor" / "fsdp_config.json").mkdir(parents=True)
    engine.save_checkpoint(str(tmp_path / "actor"))
    with pytest.raises(IsADirectoryError, match="fsdp_config.json"):
        while not engine.save_is_finished():
            time.sleep(0.01)


def test_frozen_weights_are_not_stored_and_the_adapter_is_in_pefts_format(llama, tmp_path):
    engine = make_engine(llama, lora_rank=4)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    stored = read_metadata(tmp_path / "model").state_dict_metadata
    assert stored and all(".lora_" in name for name in stored)
    again = make_engine(llama, lora_adapter_path=str(tmp_path / "lora_adapter"))
    np.testing.assert_equal(weights_of(again), weights_of(engine))
    assert json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())["r"] == 4


def test_only_tensors_and_json_are_written(tiny_llama, tmp_path):
    engine = make_engine(tiny_llama)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path), global_step=7)
    top = {p.name for p in tmp_path.iterdir()}
    assert top == {
        "model", "optim", "extra_state.json", "fsdp_config.json", "rng_rank_0.safetensors", "huggingface", DIGESTS
    }  # fmt: skip
    extra = json.loads((tmp_path / "extra_state.json").read_text())
    assert extra["global_step"] == 7 and extra["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert "cpu" in load_file(tmp_path / "rng_rank_0.safetensors")
    exported = {p.name for p in (tmp_path / "huggingface").iterdir()}  # no weights without hf_model
    assert "config.json" in exported and not any(name.endswith(".safetensors") for name in exported)


def test_metadata_that_points_outside_its_folder_or_is_something_else_is_refused(tiny_llama, tmp_path):
    make_engine(tiny_llama).save_checkpoint(str(tmp_path))
    file = tmp_path / "model" / ".metadata"
    metadata = read_metadata(tmp_path / "model")
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedMetadataError, match="elsewhere"):
        read_metadata(tmp_path / "model")
    for other, what in (({"a": 1}, "holds a dict"), (Metadata({"w": 5}, storage_data={}), "'w' is not a tensor"),
                        (Metadata({}, storage_data={"w": 5}), "is not a checkpoint's metadata: 'int'")):  # fmt: skip
        file.write_bytes(pickle.dumps(other))
        with pytest.raises(UntrustedMetadataError, match=what):
            read_metadata(tmp_path / "model")


def test_metadata_of_python_3_13_is_read(tmp_path):
    """There, the classes of paths are those of the module pathlib._local."""
    pickled = pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta(tmp_path)), protocol=3)
    (tmp_path / ".metadata").write_bytes(pickled.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert read_metadata(tmp_path).storage_meta.checkpoint_id == tmp_path


def test_a_checkpoint_of_another_model_or_optimizer_is_named(tiny_llama, tmp_path):
    engine = make_engine(tiny_llama, lora_rank=4)
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path / "lora"))
    with pytest.raises(FileNotFoundError, match="extra_state"):
        engine.load_checkpoint(str(tmp_path / "nothing"))
    bare = make_engine(tiny_llama, lora_rank=4, contents=("model",))
    bare.save_checkpoint(str(tmp_path / "bare"))
    with pytest.raises(ValueError, match="load_contents"):
        engine.load_checkpoint(str(tmp_path / "bare"))
    with logged() as messages:
        bare.load_checkpoint(str(tmp_path / "lora"))
    reason = "the optimizer starts anew, since checkpoint.load_contents lacks 'optimizer'"
    assert messages == [f"{tmp_path / 'lora'}: {reason}"]


def test_the_settings_that_a_refused_checkpoint_names_load_it(tiny_llama, tmp_path):
    """Adapters of another rank, on other layers, none, or of a run without them."""
    adapted = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}
    saved = make_engine(tiny_llama, **adapted)
    train(saved, 1)
    saved.save_checkpoint(str(tmp_path / "lora"))
    make_engine(tiny_llama).save_checkpoint(str(tmp_path / "full"))
    both = "It has adapters: set model.lora_rank=4 and model.target_modules=[q_proj,v_proj], with model.exclude"
    for folder, present, said in (
        ("lora", adapted | {"lora_rank": 8}, "is (4, 64) there, (8, 64) here. Set model.lora_rank=4."),
        ("lora", adapted | {"target_modules": ["q_proj"]}, f"]). {both}"),
        ("lora", {"lora_rank": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}, both),
        ("lora", {}, both),
        ("full", adapted, "It has no adapters: set model.lora_rank=0 and model.lora_adapter_path=null."),
    ):
        with pytest.raises(ValueError, match="does not fit the model") as refusal:
            make_engine(tiny_llama, **present).load_checkpoint(str(tmp_path / folder))
        assert said in str(refusal.value) and "such as []" not in str(refusal.value), refusal.value
    make_engine(tiny_llama, **adapted).load_checkpoint(str(tmp_path / "lora"))
    make_engine(tiny_llama, **adapted | {"lora_rank": 0}).load_checkpoint(str(tmp_path / "full"))


def test_a_full_disk_is_seen_before_writing(tiny_llama, tmp_path, monkeypatch):
    engine = make_engine(tiny_llama)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(OSError, match=r"bytes are needed, 10 are free"):
        engine.save_checkpoint(str(tmp_path / "actor"))


@pytest.mark.process
def test_a_disk_that_fills_during_writing_is_reported_as_full(tiny_llama, tmp_path):
    # Room for the tensors, too little for the archives around them and the other files.
    engine = make_engine(tiny_llama, contents=("model", "optimizer", "extra", "hf_model"))
    train(engine, 1)
    engine.save_checkpoint(str(tmp_path / "whole"))
    needed = 3 * sum(p.numel() * p.element_size() for p in engine.module.parameters())
    written = sum(f.stat().st_size for f in (tmp_path / "whole").rglob("*") if f.is_file())
    assert written > needed + 100_000
    with small_disk(tmp_path / "disk", "4m") as disk:
        for free in range(needed + 4096, written, 32_768):
            shutil.rmtree(disk / "actor", ignore_errors=True)
            filler = leave_free(disk, free)
            with pytest.raises(OSError, match="no room for the checkpoint"):
                engine.save_checkpoint(str(disk / "actor"))
            filler.unlink()
