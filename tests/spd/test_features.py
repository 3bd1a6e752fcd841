"""The feature store: a block is forwarded once, its states come back bit for bit, another target finds nothing."""

import pytest
import torch

from recipe.spd.scorer.features import FeatureStore, StoreError
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig, SPDInputData

BLOCKS = {
    "contexts": [[5, 6, 7], [8, 9]],
    "drafts": [[10, 11, 12], [13, 14]],
    "targets": [[10, 20, 21, 22], [23, 14, 24]],
}


def inputs(rows=(0, 1)) -> dict[str, torch.Tensor]:
    blocks = {name: [values[i] for i in rows] for name, values in BLOCKS.items()}
    return SPDInputData.from_blocks(**blocks, sep_token_id=3, pad_token_id=0).as_kwargs()


def build(tiny_llama, store, **settings):
    model = AutoModelForSPDScoring.from_config(ScoringModelConfig(base_model_path=tiny_llama, **settings)).eval()
    model.features = store
    return model


def fed_to(model) -> list[torch.Size]:
    """The shapes of the ids that the backbone reads from now on."""
    shapes = []
    model.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("layer", [None, 1])
def test_stored_states_give_the_logits_of_a_plain_forward(tiny_llama, tmp_path, layer):
    plain = build(tiny_llama, None, state_layer=layer)(**inputs())
    stored = build(tiny_llama, FeatureStore(tmp_path / "s", "t"), state_layer=layer)
    torch.testing.assert_close(stored(**inputs()), plain)


def test_each_block_is_forwarded_once_also_by_a_later_process(tiny_llama, tmp_path):
    model = build(tiny_llama, FeatureStore(tmp_path / "s", "t"))
    shapes = fed_to(model)
    first = model(**inputs())
    assert shapes == [(2, 6)]
    assert torch.equal(model(**inputs()), first) and shapes == [(2, 6)]
    again = build(tiny_llama, FeatureStore(tmp_path / "s", "t"))
    shapes = fed_to(again)
    assert torch.equal(again(**inputs()), first) and shapes == []


def test_only_unseen_blocks_of_a_batch_are_forwarded(tiny_llama, tmp_path):
    model = build(tiny_llama, FeatureStore(tmp_path / "s", "t"))
    shapes = fed_to(model)
    model(**inputs((0,)))
    model(**inputs((0, 1, 0, 1)))
    assert [rows for rows, _ in shapes] == [1, 1]


def test_a_full_memory_forgets_the_oldest_and_the_files_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr("recipe.spd.scorer.features.MEMORY_BYTES", 100)
    store = FeatureStore(tmp_path / "s", "t")
    blocks, states = [(i,) for i in range(5)], [torch.full((2, 4), float(i)) for i in range(5)]  # 32 bytes each
    store.put_many(blocks, states)
    stored = store.get_many(blocks)
    assert all(torch.equal(a, b) for a, b in zip(stored, states, strict=True))
    store.get_many([(4,)])
    assert store._bytes == sum(s.nbytes for s in store._memory.values()) <= 100 and (4,) in store._memory


def test_another_target_finds_nothing(tiny_llama, tmp_path):
    build(tiny_llama, FeatureStore(tmp_path / "s", "one"))(**inputs())
    other = build(tiny_llama, FeatureStore(tmp_path / "s", "other"))
    shapes = fed_to(other)
    other(**inputs())
    assert shapes == [(2, 6)]


def test_only_the_head_gets_gradients_and_the_same_ones(tiny_llama, tmp_path):
    def gradients(store):
        model = build(tiny_llama, store)
        z = model(**inputs())
        z[z < 50].sum().backward()
        assert all(p.grad is None for p in model.backbone.parameters()) and not model.train().backbone.training
        return [p.grad for p in model.head.parameters()]

    stored = FeatureStore(tmp_path / "s", "t")
    gradients(stored)
    torch.testing.assert_close(gradients(stored), gradients(None))


def test_processes_share_a_folder_and_the_older_file_counts(tmp_path):
    mine, other = FeatureStore(tmp_path / "s", "t"), FeatureStore(tmp_path / "s", "t")
    one, two = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16)
    assert mine.get_many([(1,)]) == [None]
    other.put_many([(1,), (2,)], [one, one])
    states = mine.get_many([(1,), (3,)])
    assert torch.equal(states[0], one) and states[0].dtype == torch.bfloat16 and states[1] is None
    late = FeatureStore(tmp_path / "s", "t")
    late.put_many([(2,)], [two])
    assert torch.equal(FeatureStore(tmp_path / "s", "t").get_many([(2,)])[0], one)


def test_a_torn_file_and_a_file_for_a_folder_are_named(tmp_path):
    store = FeatureStore(tmp_path / "s", "t")
    store.put_many([(1,)], [torch.ones(2, 4)])
    (file,) = store.folder.glob("*.safetensors")
    (store.folder / "0.partial").write_bytes(b"of a killed process")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(StoreError, match=f"{file.name} cannot be read: .* Remove the file"):
        FeatureStore(tmp_path / "s", "t").get_many([(1,)])
    with pytest.raises(StoreError, match="must name a folder"):
        FeatureStore(file, "t")


def test_blocks_of_one_answer_are_read_as_a_tree(tiny_llama, tmp_path):
    """Eight blocks along one text: a forward over its distinct tokens gives the states of eight rows."""
    answer = list(range(10, 40))
    blocks = {"contexts": [answer[: 20 + k] for k in range(8)], "drafts": [[40 + k, 5] for k in range(8)],
              "targets": [[30, 48 + k, 7] for k in range(8)]}
    given = SPDInputData.from_blocks(**blocks, sep_token_id=3, pad_token_id=0).as_kwargs()
    model = build(tiny_llama, FeatureStore(tmp_path / "s", "t"))
    shapes = fed_to(model)
    torch.testing.assert_close(model(**given), build(tiny_llama, None)(**given), atol=1e-5, rtol=1e-5)
    assert shapes == [(1, 27 + 8 * 2)]  # the longest context and each block's draft
