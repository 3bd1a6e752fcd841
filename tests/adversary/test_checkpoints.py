"""Checkpoint folders as they should not be: an older checkpoint is taken instead, and later saves work.

To add a manifest, append its text: `{file}` is the entry of the checkpoint's one file.
"""

import json

import pytest
from loguru import logger

from verl.training.checkpoint.publish import (
    CheckpointCorruptError,
    CheckpointWriter,
    find_valid_checkpoint,
    published_steps,
    verify_manifest,
)
from verl.utils.checkpoint.checkpoint_manager import read_tracker

MANIFESTS = [
    "", "null", "1", "[]", '"x"', "true", "{}", "nope", "\x00", "[" * 100_000, '{"files": ' * 50_000,
    '{"files": [{file}]}', '{"format": 2, "files": [{file}]}', '{"format": "1", "files": [{file}]}',
    '{"format": null, "files": [{file}]}', '{"format": [1], "files": [{file}]}', '{"format": 1}',
    '{"format": 1, "files": null}', '{"format": 1, "files": 5}', '{"format": 1, "files": {"a": 1}}',
    '{"format": 1, "files": "data"}', '{"format": 1, "files": []}', '{"format": 1, "files": [null]}',
    '{"format": 1, "files": [5]}', '{"format": 1, "files": ["data"]}', '{"format": 1, "files": [[]]}',
    '{"format": 1, "files": [{}]}', '{"format": 1, "files": [{"file": "data"}]}',
    '{"format": 1, "files": [{"file": 5, "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": null, "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": ["data"], "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": "5", "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": 5.0, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": true, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": -5, "sha256": "x"}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": 5, "sha256": null}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": 5, "sha256": 7}]}',
    '{"format": 1, "files": [{"file": "data", "bytes": 5, "sha256": ["x"]}]}',
    '{"format": 1, "files": [{file}, {"file": "../data", "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{file}, {"file": "/etc/passwd", "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{file}, {"file": "manifest.json", "bytes": 5, "sha256": "x"}]}',
    '{"format": 1, "files": [{file}], "files": []}',
    '{"format": 1, "files": ' + "9" * 5000 + "}",
]


def save(root, step, max_to_keep=None):
    with CheckpointWriter(root, step, max_to_keep) as writer:
        (writer.path / "data").write_text("state")


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_a_manifest_that_is_none_is_refused_with_a_message_and_the_older_step_taken(tmp_path, number):
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / "global_step_2" / "manifest.json"
    entry = json.dumps(json.loads(file.read_text())["files"][0])
    file.write_text(MANIFESTS[number].replace("{file}", entry))
    lines = []
    sink = logger.add(lines.append, format="{message}")
    assert find_valid_checkpoint(tmp_path) == tmp_path / "global_step_1"
    logger.remove(sink)
    assert "global_step_2 is refused" in lines[0] and len(lines[0]) < 1000
    with pytest.raises(CheckpointCorruptError):
        verify_manifest(tmp_path / "global_step_2")


@pytest.mark.parametrize("bytes_", [b"", b"ten", b"-1", b"1.5", b"\xff\xfe", b"9" * 500, b"\xc2\xb2", b"1 2", b"\x00"])
def test_a_tracker_file_that_is_none_is_named(tmp_path, bytes_):
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(bytes_)
    with pytest.raises(CheckpointCorruptError, match="latest_checkpointed_iteration.txt holds"):
        read_tracker(tmp_path)


@pytest.mark.parametrize("name", ["global_step_1", "global_step_1.tmp", "global_step_1.trash", "global_step_0.old",
                                  "latest_checkpointed_iteration.txt.tmp"])  # fmt: skip
@pytest.mark.parametrize("target", ["folder", "file", "nothing"])
def test_links_in_the_folder_break_no_save_and_their_targets_stay(tmp_path, name, target):
    other, root = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    (other / "file").write_text("kept")
    save(root, 0)
    (root / name).symlink_to({"folder": other, "file": other / "file", "nothing": tmp_path / "nothing"}[target])
    for step in (1, 2, 3):
        save(root, step, max_to_keep=2)
    assert published_steps(root)[-2:] == [2, 3] and find_valid_checkpoint(root) == root / "global_step_3"
    assert (other / "file").read_text() == "kept"


def test_a_checkpoint_that_was_moved_to_another_disk_is_rotated_as_a_link(tmp_path):
    root = tmp_path / "run"
    save(root, 1)
    (root / "global_step_1").rename(tmp_path / "moved")
    (root / "global_step_1").symlink_to(tmp_path / "moved")
    assert find_valid_checkpoint(root) == root / "global_step_1"
    save(root, 1)  # again, over the link
    save(root, 2, max_to_keep=1)
    assert published_steps(root) == [2] and (tmp_path / "moved" / "data").read_text() == "state"


@pytest.mark.parametrize("name", ["global_step_007", "global_step_\u0663", "global_step_" + "9" * 99, "global_step_-1"])
def test_folders_with_other_numbers_are_no_checkpoints(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    for step in (8, 9):
        save(tmp_path, step, max_to_keep=1)
    assert published_steps(tmp_path) == [9] and (tmp_path / name).is_dir()
