"""Folders that POST /update_weights_from_disk may name: refused before requests are aborted or weights are read."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from verl.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.rollout.vllm_rollout.vllm_rollout import vLLMRollout
from verl.utils.weight_files import WeightFileError

INDEXES = ["", "null", "[]", "5", "{", "{}", '{"weight_map": null}', '{"weight_map": []}', '{"weight_map": {"a": 5}}',
           '{"weight_map": {"a": null}}', '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "../../x"}}',
           '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "absent.safetensors"}}', "[" * 50_000,
           '{"weight_map": {"a": ["b"]}}', '{"weight_map": "model.safetensors"}']  # fmt: skip
FILES = [b"", b"\x00", b"\xff" * 64, b"\x05\x00\x00\x00\x00\x00\x00\x00{}", b"pickle" * 9, b"\x7f" * 8 + b"{"]


@pytest.fixture
def rollout(tmp_path):
    """A rollout whose own model has tensors a [2, 2] and b [3]."""
    (tmp_path / "own").mkdir()
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(3)}, tmp_path / "own" / "model.safetensors")
    self = SimpleNamespace(model_config=SimpleNamespace(local_path=tmp_path / "own"), is_awake=True, has_weights=True,
                           adapter=None, loaded=[])  # fmt: skip
    self.weights_on_disk = lambda path: vLLMRollout.weights_on_disk(self, path)
    self.load_from_disk = self.loaded.append
    return self


@pytest.mark.parametrize("text", INDEXES, ids=lambda text: text[:40])
def test_an_index_that_is_none_is_refused(rollout, tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightFileError):
        rollout.weights_on_disk(tmp_path)


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_a_file_that_is_none_is_refused(rollout, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightFileError, match="model.safetensors"):
        rollout.weights_on_disk(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({"a": torch.zeros(2, 3), "b": torch.zeros(3)}, "a has the shape .* Name a folder"),
     ({"c": torch.zeros(1)}, "none of the engine"), ({}, "no safetensors file")],
)  # fmt: skip
def test_the_weights_of_another_model_are_refused(rollout, tmp_path, tensors, message):
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightFileError, match=message):
        rollout.weights_on_disk(tmp_path)


@pytest.mark.process
def test_nothing_is_aborted_for_a_folder_that_is_refused(rollout, tmp_path):
    engine = SimpleNamespace(abort_request=lambda rids, internal: None)
    server = vLLMHttpServer(engine, rollout, vocab_size=9, max_model_len=9)
    body = {"model_path": str(tmp_path), "abort_all_requests": True, "weight_version": "7"}
    aborted = []
    server._abort_all = lambda: aborted.append(True)
    with pytest.raises(WeightFileError):
        server.call(server._update_from_disk, body)
    with pytest.raises(ValueError, match="model_path is missing"):
        server.call(server._update_from_disk, {})
    assert not aborted and server.weight_version == "default" and not rollout.loaded
    body["model_path"] = str(rollout.model_config.local_path)
    assert server.call(server._update_from_disk, body)["success"]
    assert aborted and server.weight_version == "7" and rollout.loaded == [body["model_path"]]
    server.close()
