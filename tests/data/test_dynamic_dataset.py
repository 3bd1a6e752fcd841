"""Prompts that are generated during training: when they are drawn, and after a resume."""

import io
import json

import pytest
import torch
from omegaconf import OmegaConf

from tests.helpers.models import make_tokenizer
from verl.data.dynamicgen_dataset import AbstractDataGenerator, DynamicGenDataset
from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.trainer.ppo.data_loading import create_rl_dataset
from verl.trainer.run.prompt_stream import PromptStream

HERE = f"pkg://{__name__}"


def row(text):
    return {"data_source": "x", "prompt": [{"role": "user", "content": text}]}


class Counter(AbstractDataGenerator):
    """One new prompt after each batch, named by how many there were."""

    def generate(self, dataset):
        return [row(f"{len(dataset) + len(dataset.waiting)} a")] if self.config.name == "Counter" else []


class NotAGenerator:
    pass


def dataset(folder, name="Counter", train=True, **more):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row(str(i))) + "\n" for i in range(4)))
    config = OmegaConf.create({"max_prompt_length": 20, "datagen": {"path": HERE, "name": name}, **more})
    return create_rl_dataset(str(file), config, make_tokenizer(), None, train)


def stream(data):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    return PromptStream(StatefulDataLoader(data, batch_size=2, sampler=sampler, drop_last=True, collate_fn=collate_fn))


def steps(source, count):
    """Prompt ids of `count` batches, each followed by the generator."""
    drawn = []
    for _ in range(count):
        batch = source.draw()
        drawn.append([list(ids) for ids in batch.non_tensor_batch["raw_prompt_ids"]])
        source.loader.dataset.on_batch_end(batch)
    return drawn


def test_a_generator_without_a_name_is_asked_for_by_its_keys(tmp_path):
    with pytest.raises(TypeError, match="data.datagen.path and data.datagen.name must name"):
        dataset(tmp_path, name=None)


def test_new_rows_are_drawn_from_the_next_epoch_on(tmp_path):
    data = dataset(tmp_path)
    assert isinstance(data, DynamicGenDataset) and type(dataset(tmp_path, train=False)) is RLHFDataset
    source = stream(data)
    steps(source, 2)  # an epoch of 4 rows
    assert (len(data), len(data.waiting)) == (4, 2)
    epoch = steps(source, 3)  # one of 6
    assert source.position() == {"epoch": 2, "drawn": 10, "batches_in_epoch": 0}
    texts = [data.tokenizer.decode(ids) for batch in epoch for ids in batch]
    assert sorted(texts) == [f"q : {name} a :" for name in ("0", "1", "2", "3", "4 a", "5 a")]
    with pytest.raises(ValueError, match="data.datagen.name=Counter, row 1: what"):
        raise data.error(5, "what")


@pytest.mark.parametrize("before", [1, 2, 3, 5])  # within an epoch and at its end
def test_a_resumed_stream_has_the_generated_rows(tmp_path, before):
    uninterrupted = steps(stream(dataset(tmp_path)), 8)
    first, file = stream(dataset(tmp_path)), io.BytesIO()
    assert steps(first, before) == uninterrupted[:before]
    torch.save(first.loader_state(), file)
    file.seek(0)
    second = stream(dataset(tmp_path))
    second.resume(first.position(), torch.load(file, weights_only=True))
    assert steps(second, 8 - before) == uninterrupted[before:]


def test_long_prompts_are_filtered_and_other_classes_refused(tmp_path):
    data = dataset(tmp_path, filter_overlong_prompts=True, max_prompt_length=5)
    data.append_dataframe([row("a"), row("a a a a")])
    assert len(data) == 5 and data.dropped_overlong == 1
    with pytest.raises(TypeError, match="data.datagen.name='NotAGenerator'.*AbstractDataGenerator is needed"):
        dataset(tmp_path, "NotAGenerator")
