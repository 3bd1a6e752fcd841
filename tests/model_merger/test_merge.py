"""The merged folder is the trained model for plain transformers; torn, foreign and hostile folders are named."""

import ctypes
import gc
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.helpers.engines import make_actor, make_engine, rl_batch
from tests.helpers.models import make_tokenizer, save_tiny_llama
from tests.helpers.ranks import run_ranks
from tests.test_hostile_files import Code
from verl.model_merger.__main__ import main
from verl.model_merger.merge import MergedWeights, MergeOptions
from verl.training.checkpoint import CheckpointWriter
from verl.utils.weight_files import WeightFileError, write_safetensors
from verl.workers.config import HFModelConfig

IDS = torch.arange(5, 29).view(2, 12)


def saved(engine, root, name="actor", step=3):
    """The engine after an update, in a published step; its own logits."""
    with CheckpointWriter(root, step) as writer:
        engine.save_checkpoint(str(writer.path / name), global_step=step)
    with torch.no_grad(), engine.eval_mode():
        logits = engine.module(input_ids=IDS).logits.clone()
    return root / f"global_step_{step}" / name, logits


def save_flagged(folder, same=False):
    """A small Llama whose config.json ties the output matrix, stored with one of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    if same:
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    make_tokenizer().save_pretrained(folder)
    return str(folder), model


def test_an_output_matrix_of_its_own_is_trained_saved_and_merged_whatever_the_flag_says(tmp_path):
    path, model = save_flagged(tmp_path / "model")
    engine = make_engine(path, lr=0.0)
    checkpoint, logits = saved(engine, tmp_path / "run")
    with torch.no_grad():
        assert torch.allclose(logits, model(input_ids=IDS).logits, atol=1e-5)
    settings = json.loads((checkpoint / "huggingface" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is False
    older = Path(shutil.copytree(checkpoint, tmp_path / "older"))  # whose config has the flag, as it had before
    (older / "huggingface" / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    for folder in (checkpoint, older):
        target = tmp_path / f"merged_{folder.name}"
        assert main(["merge", "--local_dir", str(folder), "--target_dir", str(target)]) == 0
        merged = AutoModelForCausalLM.from_pretrained(target)
        assert merged.config.tie_word_embeddings is False
        assert torch.equal(merged.lm_head.weight, model.lm_head.weight)


def test_an_output_matrix_equal_to_the_embedding_stays_tied(tmp_path):
    path, _ = save_flagged(tmp_path / "same", same=True)
    config = HFModelConfig(path=path, load_tokenizer=False).load()
    assert config.hf_config.tie_word_embeddings is True and not config.untied
    path, _ = save_flagged(tmp_path / "other")
    config = HFModelConfig(path=path, load_tokenizer=False).load()
    assert config.hf_config.tie_word_embeddings is False and config.untied


def trained(model, **settings):
    engine = make_engine(model, **settings)
    make_actor(engine).update_policy(rl_batch())
    return engine


def run(*arguments):
    return main([str(a) for a in arguments])


def assert_refused(match, folder, target, *more):
    """A merge of the folder ends with this message."""
    with pytest.raises(SystemExit, match=match) as refusal:
        run("merge", "--local_dir", folder, "--target_dir", target, *more)
    assert "\n" not in str(refusal.value)


def logits_of(folder, auto=AutoModelForCausalLM):
    with torch.no_grad():
        return auto.from_pretrained(folder)(input_ids=IDS).logits


def test_a_merged_model_gives_the_same_logits_in_plain_transformers(llama, tmp_path):
    folder, logits = saved(trained(llama), tmp_path)
    assert run("merge", "--backend", "fsdp", "--local_dir", folder, "--target_dir", tmp_path / "hf",
               "--use_cpu_initialization", "--max_shard_size", "100KB", "--hf_model_path", llama) == 0  # fmt: skip
    assert torch.equal(logits_of(tmp_path / "hf"), logits)
    shards = [load_file(file) for file in (tmp_path / "hf").glob("model-*.safetensors")]
    assert len(shards) > 2 and any("lm_head.weight" in shard for shard in shards) == ("tied" not in llama)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token == "<pad>"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert run("test", "--local_dir", folder, "--test_hf_dir", tmp_path / "hf") == 0
    assert run("test", "--local_dir", folder, "--test_hf_dir", llama) == 1  # the update moved it


def test_every_option_of_the_command_line_and_none(tmp_path, monkeypatch):
    asked, target = [], tmp_path / "hf"
    monkeypatch.setattr("verl.model_merger.merge.merge", lambda *given: asked.append(given))
    monkeypatch.setattr("verl.model_merger.merge.differences", lambda *given: asked.append(given[:2]) or 0)
    common, flags = ("--local_dir", "a"), ("--tie-word-embedding", "--trust-remote-code", "--is-value-model")
    values = ("--hf_model_path", "m", "--dtype", "fp16", "--backend", "fsdp", "--use_cpu_initialization")
    assert run("merge", *common, "--target_dir", target) == 0
    assert run("merge", *common, *values, *flags, "--max_shard_size", "1MB", "--target_dir", target) == 0
    assert run("test", *common, "--test_hf_dir", "b") == 0
    assert run("test", *common, *values, *flags, "--test_hf_dir", "b") == 0
    plain = MergeOptions(Path("a"))
    true = {"tie_word_embedding": True, "trust_remote_code": True, "is_value_model": True}
    full = MergeOptions(Path("a"), Path("m"), "fp16", **true)
    sharded, other = replace(full, max_shard_size="1MB"), Path("b")
    assert asked == [(plain, target), (sharded, target), (plain, other), (full, other)]


def test_lora_is_merged_into_the_model_that_it_was_trained_on(llama, tmp_path):
    engine = trained(llama, lora_rank=4, lora_alpha=12)
    make_actor(engine).update_policy(rl_batch(seed=1))  # B is zero before the first update
    folder, logits = saved(engine, tmp_path)
    assert run("merge", "--local_dir", folder, "--target_dir", tmp_path / "hf") == 0
    assert torch.allclose(logits_of(tmp_path / "hf"), logits, atol=1e-5)
    assert not torch.allclose(logits_of(llama), logits, atol=1e-3)
    config = folder / "lora_adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(llama, "/nowhere/model"))
    assert_refused("adapter_config.json has .* bytes, the manifest says .* Copy it again", folder, tmp_path / "again")
    (folder.parent / "manifest.json").unlink()
    alone = folder.rename(tmp_path / "alone")  # a folder copied by hand has no manifest
    assert_refused("name the folder of the model that was trained in --hf_model_path", alone, tmp_path / "again")
    assert run("merge", "--local_dir", alone, "--target_dir", tmp_path / "again", "--hf_model_path", llama) == 0
    assert torch.allclose(logits_of(tmp_path / "again"), logits, atol=1e-5)


def test_a_critic_becomes_a_model_of_one_value_a_token(llama, tmp_path):
    from verl.workers.config import PluginConfig

    engine = make_engine(llama, loader=PluginConfig(name="value_head"))
    folder, values = saved(engine, tmp_path, "critic")
    assert run("merge", "--local_dir", folder, "--target_dir", tmp_path / "hf", "--is-value-model") == 0
    assert torch.equal(logits_of(tmp_path / "hf", transformers.AutoModelForTokenClassification), values)


def test_the_dtype_can_be_chosen(tiny_llama, tmp_path):
    folder, _ = saved(make_engine(tiny_llama), tmp_path)
    run("merge", "--local_dir", folder, "--target_dir", tmp_path / "hf", "--dtype", "bf16")
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    assert run("test", "--local_dir", folder, "--test_hf_dir", tmp_path / "hf", "--dtype", "bf16") == 0


def write_rank_files(rank, world_size, model, folder):
    """What verl 0.7 leaves: one state dict of DTensors a rank; sharded over the ranks, and one whole copy a rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from verl.training.parallel.sharding import apply_fsdp2, create_device_mesh

    for name, size in (("sharded", -1), ("copies", 1)):
        module = AutoModelForCausalLM.from_pretrained(model)
        apply_fsdp2(module, create_device_mesh(world_size, size, "cpu"), wrap_policy={}, reshard_after_forward=True,
                    mp_policy=MixedPrecisionPolicy(), offload_policy=False, forward_prefetch=False)  # fmt: skip
        torch.save(module.state_dict(), f"{folder}/{name}/model_world_size_{world_size}_rank_{rank}.pt")


@pytest.mark.process
def test_per_rank_files_of_verl_are_put_together(tiny_llama, tmp_path):
    for name in ("sharded", "copies"):
        (tmp_path / name).mkdir()
    run_ranks(write_rank_files, 2, tiny_llama, str(tmp_path))
    for name in ("sharded", "copies"):
        given = ("--local_dir", tmp_path / name, "--hf_model_path", tiny_llama)
        assert run("test", *given, "--test_hf_dir", tiny_llama) == 0
        assert run("merge", *given, "--target_dir", tmp_path / f"{name}_hf") == 0
        assert torch.equal(logits_of(tmp_path / f"{name}_hf"), logits_of(tiny_llama))
    (tmp_path / "sharded" / "model_world_size_2_rank_1.pt").unlink()
    missing = "model_world_size_2_rank_1.pt is missing: .* written by 2 ranks"
    assert_refused(missing, tmp_path / "sharded", tmp_path / "again")


def test_a_hostile_rank_file_or_metadata_runs_nothing(tiny_llama, tmp_path):
    sentinel = tmp_path / "ran"
    torch.save({"a": Code(sentinel)}, tmp_path / "model_world_size_1_rank_0.pt")
    said = "rank_0.pt holds more than tensors and is not loaded"
    assert_refused(said, tmp_path, tmp_path / "hf", "--hf_model_path", tiny_llama)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".metadata").write_bytes(pickle.dumps(Code(sentinel)))
    assert_refused("refers to .*mkdir", tmp_path, tmp_path / "hf")
    assert not sentinel.exists() and not (tmp_path / "hf").exists()


def test_wrong_folders_are_refused_in_one_line(tiny_llama, tmp_path):
    folder, _ = saved(make_engine(tiny_llama), tmp_path)
    assert_refused("absent does not exist; expected", tmp_path / "absent", tmp_path / "hf")
    assert_refused(f"Did you mean --local_dir {folder}", folder.parent, tmp_path / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    assert_refused("full is not empty", folder, tmp_path / "full")
    assert_refused("megatron is not supported", folder, tmp_path / "hf", "--backend", "megatron")
    piece = next((folder / "model").glob("*.distcp"))
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 0xFF
    piece.write_bytes(data)
    assert_refused(f"{piece.name} was altered.* Copy it again", folder, tmp_path / "hf")
    (folder.parent / "manifest.json").unlink()
    assert_refused("no manifest.json; the folder was not written to its end", folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.tmp").exists()


def test_a_checkpoint_of_another_model_is_refused(tiny_llama, tmp_path):
    folder, _ = saved(make_engine(tiny_llama), tmp_path)
    assert_refused("lm_head.weight.*leave --is-value-model out", folder, tmp_path / "hf", "--is-value-model")
    run("merge", "--local_dir", folder, "--target_dir", tmp_path / "hf")
    for name, size, message in (("deep", {"layers": 1}, "layers.1.*"), ("wide", {"hidden": 128}, "shape .64, 64.*")):
        other, loose = save_tiny_llama(tmp_path / name, **size), tmp_path / f"loose_{name}"
        shutil.copytree(folder, loose)
        described = loose / "huggingface" / "config.json"
        shutil.copy(f"{other}/config.json", described)  # --hf_model_path would not count beside it
        assert_refused(f"{message}another model was trained.* replace {described}", loose, tmp_path / f"{name}_1")
        described.unlink()
        assert_refused("name the model in --hf_model_path", loose, tmp_path / f"{name}_1")
        wrong, right = (["--hf_model_path", path] for path in (other, tiny_llama))
        assert_refused(f"{message}another model .* --hf_model_path", loose, tmp_path / f"{name}_1", *wrong)
        run("merge", "--local_dir", loose, "--target_dir", tmp_path / f"{name}_1", *right)


def test_adapters_without_their_config_are_refused_until_it_is_copied(tiny_llama, tmp_path):
    folder, _ = saved(make_engine(tiny_llama, lora_rank=2), tmp_path / "run")
    shutil.copytree(folder, loose := tmp_path / "loose")
    shutil.rmtree(loose / "lora_adapter")
    assert_refused("adapter_config.json is missing: copy that folder", loose, tmp_path / "hf")
    shutil.copytree(folder / "lora_adapter", loose / "lora_adapter")
    run("merge", "--local_dir", loose, "--target_dir", tmp_path / "hf")


def test_written_safetensors_are_those_of_the_library(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.randn(2, 2).bfloat16(), "d": torch.tensor(2.5)}
    described = {name: t.to("meta") for name, t in tensors.items()}
    write_safetensors(tmp_path / "own", described, lambda name: tensors[name])
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    for name, tensor in load_file(tmp_path / "own").items():
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype
    assert abs((tmp_path / "own").stat().st_size - (tmp_path / "theirs").stat().st_size) <= 16  # the order differs
    with pytest.raises(WeightFileError, match="a is torch.float32 .3, 5., not"):
        write_safetensors(tmp_path / "own", {"a": torch.empty(4, device="meta")}, lambda name: tensors[name])


def risen_bytes(work):
    """What this process's memory rises by, at its peak, while `work` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now the present use
    now, _ = memory()
    work()
    return memory()[1] - now


def memory():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")]


def test_the_peak_of_a_merge_is_less_than_one_of_its_shards(tmp_path):
    """109 MB of weights in shards of 48 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
                         num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    folder, _ = saved(make_engine(str(tmp_path / "model"), contents=("model",)), tmp_path)
    given = ("merge", "--local_dir", folder, "--max_shard_size", "48MB", "--target_dir")
    peak = risen_bytes(lambda: run(*given, tmp_path / "hf"))
    shards = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) >= 3 and sum(s.stat().st_size for s in shards) > 100e6
    weights = MergedWeights(MergeOptions(local_dir=folder))
    whole = risen_bytes(lambda: [weights.read(name) for name in weights.described])
    print(f"peak memory of the merge: {peak / 1e6:.1f} MB over {len(shards)} shards; all weights: {whole / 1e6:.1f} MB")
    assert peak < 48e6 and whole > 90e6
