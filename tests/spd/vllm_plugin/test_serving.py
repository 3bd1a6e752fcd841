"""What is refused before an engine starts, and the command that is composed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.spd.scorer.config import CONFIG_FILE
from recipe.spd.scorer.model import HEAD_FILE
from recipe.spd.vllm_plugin import engine_options
from scripts import serve_spd
from scripts.serve_spd import given_values
from tests.spd.vllm_plugin.pair import make_pair
from verl.data import fingerprint
from verl.data.fingerprint import cached_folder_fingerprint, folder_fingerprint


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def changed(model: str, folder: Path) -> str:
    """A copy of a model with other weights."""
    shutil.copytree(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        loaded.lm_head.weight[0] += 1
    loaded.save_pretrained(folder)
    return str(folder)


def scorer_with(pair, folder: Path, **settings) -> str:
    shutil.copytree(pair.scorer, folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **settings}))
    return str(folder)


def test_a_draft_with_padded_embeddings_is_served_by_its_tokens(pair, tmp_path):
    padded = AutoModelForCausalLM.from_pretrained(pair.draft)
    padded.resize_token_embeddings(padded.config.vocab_size + 16)
    padded.save_pretrained(tmp_path / "padded")
    options = engine_options(pair.target, pair.scorer, draft=tmp_path / "padded", allow_foreign_drafter=True)
    assert options["speculative_config"]["use_heterogeneous_vocab"] is True


def test_a_foreign_target_is_refused_unless_it_is_allowed(pair, tmp_path):
    other = changed(pair.target, tmp_path / "other")
    with pytest.raises(ValueError, match="belongs to the model .*allow_foreign_target .*--allow-foreign-target"):
        engine_options(other, pair.scorer, draft=pair.draft)
    assert engine_options(other, pair.scorer, draft=pair.draft, allow_foreign_target=True)["model"] == other


def test_a_foreign_drafter_is_refused_unless_it_is_allowed(pair, tmp_path):
    other = changed(pair.draft, tmp_path / "other")
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    for drafter in ({"draft": other}, {"speculative_config": ngram}):
        with pytest.raises(ValueError, match="of another drafter .*allow_foreign_drafter .*--allow-foreign-drafter"):
            engine_options(pair.target, pair.scorer, **drafter)
        assert engine_options(pair.target, pair.scorer, **drafter, allow_foreign_drafter=True)


@pytest.mark.parametrize(
    "engine, named",
    [({"enable_lora": True}, "enable_lora=True"), ({"decode_context_parallel_size": 2}, "context_parallel_size=2"),
     ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling"),
     ({"logprobs_mode": "processed_logprobs"}, "raw mode")],
)  # fmt: skip
def test_engine_options_that_a_scorer_cannot_serve_are_refused(pair, engine, named):
    with pytest.raises(ValueError, match=named):
        engine_options(pair.target, pair.scorer, draft=pair.draft, **engine)


def test_a_missing_torn_or_own_scorer_is_refused(pair, tmp_path):
    serve = dict(draft=pair.draft)
    with pytest.raises(FileNotFoundError, match="not a saved scorer"):
        engine_options(pair.target, str(tmp_path / "none"), **serve)
    torn = scorer_with(pair, tmp_path / "torn")
    (Path(torn) / HEAD_FILE).write_bytes(b"torn")
    with pytest.raises(ValueError, match=f"{HEAD_FILE} is missing or incomplete"):
        engine_options(pair.target, torn, **serve)
    own = scorer_with(pair, tmp_path / "own", backbone="own")
    with pytest.raises(ValueError, match="scorer of spd.backbone=own"):
        engine_options(pair.target, own, **serve)
    with pytest.raises(ValueError, match="speculative_config"):
        engine_options(pair.target, pair.scorer)


def test_fingerprints_are_computed_once_until_a_file_changes(pair, tmp_path, monkeypatch):
    model = Path(changed(pair.target, tmp_path / "model"))
    calls = []

    def counted(*args):
        calls.append(args)
        return folder_fingerprint(*args)

    monkeypatch.setattr(fingerprint, "folder_fingerprint", counted)
    first = cached_folder_fingerprint(model)
    assert cached_folder_fingerprint(model) == first and len(calls) == 1
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert cached_folder_fingerprint(model) != first and len(calls) == 2


def test_vllm_options_that_a_scorer_restricts_are_read_from_the_command_line():
    assert given_values(["--enable-lora", "--port", "8000", "--logprobs-mode=raw_logits"]) == {
        "enable_lora": True, "logprobs_mode": "raw_logits"
    }  # fmt: skip
    assert given_values(["--decode-context-parallel-size", "2"]) == {"decode_context_parallel_size": 2}


@pytest.mark.parametrize(("device", "rest", "cache"), [
    ("cpu", [], "1000"), ("cpu", ["--kv-cache-memory-bytes", "7"], "1000 --kv-cache-memory-bytes 7"),
    ("cpu", ["--gpu_memory_utilization=0.4"], None), ("cuda", [], None),
])  # fmt: skip
def test_on_a_cpu_the_cache_takes_a_quarter_of_the_free_memory(device, rest, cache, monkeypatch, capsys):
    monkeypatch.setattr(serve_spd, "get_device_name", lambda: device)
    monkeypatch.setattr(serve_spd, "available_memory", lambda: 4003)
    serve_spd.serve({"model": "m"}, rest, only_print=True)
    shown = capsys.readouterr().out.rstrip()
    assert shown.endswith(f"--kv-cache-memory-bytes {cache}") if cache else "--kv-cache-memory-bytes" not in shown


@pytest.mark.process
def test_the_command_prints_what_it_would_run_or_one_message(pair):
    def serve(*more):
        command = [sys.executable, "scripts/serve_spd.py", "--target", pair.target, "--draft", pair.draft, *more]
        return subprocess.run(command, capture_output=True, text=True)

    shown = serve("--scorer", pair.scorer, "--print", "--port", "8001")
    assert shown.stdout.startswith(f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {pair.target}")
    assert shown.stdout.rstrip().endswith("--port 8001")
    refused = serve("--scorer", pair.target)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "not a saved scorer" in refused.stderr
