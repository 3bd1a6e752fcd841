"""A saved and resumed stream of prompts gives the batches that an uninterrupted one gives."""

import io

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl.data.fingerprint import data_fingerprint
from verl.trainer.run.prompt_stream import PromptStream


class Numbers(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, i):
        return {"x": torch.tensor(i)}


def stream(seed: int = 3, workers: int = 0) -> PromptStream:
    data = Numbers()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    options = {"batch_size": 3, "drop_last": True, "sampler": sampler}
    return PromptStream(StatefulDataLoader(data, num_workers=workers, **options))


def drawn(source: PromptStream, batches: int) -> list[tuple[list[int], list[str]]]:
    rows = [source.draw() for _ in range(batches)]
    return [(b.batch["x"].tolist(), b.non_tensor_batch["uid"].tolist()) for b in rows]


def test_epochs_follow_each_other_in_new_orders_and_uids_count_on():
    source = stream()
    rows = drawn(source, 7)
    assert source.position() == {"epoch": 2, "drawn": 21, "batches_in_epoch": 1}
    assert rows[0][0] != rows[3][0]
    assert [uid for _, uids in rows for uid in uids] == [str(i) for i in range(21)]


@pytest.mark.parametrize("before", range(8))  # 3 and 6 are ends of an epoch
def test_resumed_stream_continues_at_its_position(before):
    whole = drawn(stream(), 8)
    first = stream()
    drawn(first, before)
    file = io.BytesIO()
    torch.save(first.loader_state(), file)
    file.seek(0)
    second = stream(seed=99)
    second.resume(first.position(), torch.load(file, weights_only=True))
    assert drawn(second, 8 - before) == whole[before:]


@pytest.mark.process
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
def test_another_number_of_loader_processes_is_an_error(before, after):
    first, second = stream(workers=before), stream(workers=after)
    drawn(first, 2)
    with pytest.raises(ValueError, match=f"dataloader_num_workers={after}, but the checkpoint was saved with {before}"):
        second.resume(first.position(), first.loader_state())


def test_changed_data_begin_at_their_first_batch_and_keep_the_counters():
    source = stream()
    source.restart({"epoch": 1, "drawn": 15, "batches_in_epoch": 2})
    assert drawn(source, 1)[0][1] == ["15", "16", "17"]
    assert source.position() == {"epoch": 1, "drawn": 18, "batches_in_epoch": 1}


def test_fingerprint_sees_a_changed_byte_but_not_another_folder(tmp_path):
    for folder, text in (("a", "same"), ("b", "same"), ("c", "sane")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(text)
    a, b, c = (data_fingerprint(str(tmp_path / f / "train.jsonl"), rows=4) for f in "abc")
    assert a == b != c
    assert data_fingerprint([str(tmp_path / "a" / "train.jsonl")], rows=5) != a
