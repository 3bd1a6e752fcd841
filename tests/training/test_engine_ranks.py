"""One rank against two: same losses, gradients and weights, whatever the cut; checkpoints across rank numbers."""

import json
import time

import numpy as np
import pytest
import torch

from tests.helpers.engines import make_actor, make_engine, rl_batch, weights_of
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import mean_metrics, run_ranks
from verl.training.checkpoint import CheckpointWriter, publish
from verl.training.parallel.sharding import full_tensor
from verl.utils.distributed import host_barrier

pytestmark = [pytest.mark.process, pytest.mark.slow]

VOCAB = 63  # odd: the two shards of embedding and output matrix differ in size
KL = dict(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)


def share_of(rank, world_size, seed=0):
    rows = 8 // world_size
    return rl_batch(vocab=VOCAB, seed=seed)[rank * rows : (rank + 1) * rows]


def sgd_step(rank, world_size, path, *, micro, engine=None, poison=None, **model):
    """(metrics of this rank, whole weights) after one SGD step of rate 1: weights differ as gradients do."""
    sgd = {"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0, "clip_grad": None}
    built = make_engine(path, optim=sgd, engine=engine, **model)
    actor = make_actor(built, mini=8 // world_size, micro=micro, grad_clip=1e6, **KL)
    batch = share_of(rank, world_size)
    if poison == rank:
        batch.batch["advantages"][0, 0] = float("nan")
    return actor.update_policy(batch), weights_of(built)


def steps(engine, rank, world_size, seeds):
    actor = make_actor(engine, mini=8 // world_size, micro=2, **KL)
    return [actor.update_policy(share_of(rank, world_size, seed))["actor/pg_loss"][0] for seed in seeds]


def on_disk(file, result):
    """(what was counted, file of the weights): weights are too large for the pipe between processes."""
    counted, weights = result
    np.savez(file, **weights)
    return counted, f"{file}.npz"


def moments_of(engine) -> dict:
    """Whole tensors of the optimizer's state by parameter and name."""
    state = {name: engine.optimizer.state[p] for name, p in engine.module.named_parameters() if p.requires_grad}
    return {f"{name}/{key}": full_tensor(value).numpy() for name, of in state.items() for key, value in of.items()}


def resumed(rank, world_size, path, folder, file, **model):
    """The losses of two steps after the checkpoint in `folder`; the optimizer's state as loaded goes into `file`."""
    engine = make_engine(path, **model)
    engine.load_checkpoint(folder)
    if rank == 0:
        np.savez(file, **moments_of(engine))
    else:
        moments_of(engine)  # gathering is a collective call
    return steps(engine, rank, world_size, [3, 4])


def two_ranks(rank, world_size, path, folder):
    out = {}
    disk = f"{folder}_rank{rank}_"
    for name, options in {
        "hybrid": dict(micro=2, engine={"fsdp_size": 1}),
        "lora": dict(micro=2, lora_rank=4),
        "poisoned": dict(micro=2, poison=1),
    }.items():
        out[name] = on_disk(disk + name, sgd_step(rank, world_size, path, **options))
    engine = make_engine(path, lora_rank=4)
    steps(engine, rank, world_size, [1, 2])
    engine.save_checkpoint(f"{folder}_lora", global_step=2)
    out["straight lora"] = steps(engine, rank, world_size, [3, 4]), None
    engine = make_engine(path)
    steps(engine, rank, world_size, [1, 2])
    engine.save_checkpoint(folder, global_step=2)
    out["moments"] = on_disk(disk + "moments", (None, moments_of(engine)))
    out["straight"] = on_disk(disk + "straight", (steps(engine, rank, world_size, [3, 4]), weights_of(engine)))
    again = make_engine(path)
    again.load_checkpoint(folder)
    out["resumed"] = on_disk(disk + "resumed", (steps(again, rank, world_size, [3, 4]), weights_of(again)))
    return out


@pytest.fixture(scope="module")
def odd_llama(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("odd_llama"), vocab_size=VOCAB, tied=True)


@pytest.fixture(scope="module")
def of_two(odd_llama, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("of_two") / "actor")
    return run_ranks(two_ranks, 2, odd_llama, folder), folder


def other_ranks(rank, world_size, path, folder):
    """{model: losses after the resume}"""
    file = f"{folder}_on{world_size}_"
    return {
        "straight": resumed(rank, world_size, path, folder, f"{file}full.npz"),
        "straight lora": resumed(rank, world_size, path, f"{folder}_lora", f"{file}lora.npz", lora_rank=4),
    }


@pytest.mark.parametrize(("name", "model"), [("hybrid", {}), ("lora", {"lora_rank": 4})])
def test_two_ranks_give_the_losses_and_gradients_of_one(odd_llama, of_two, name, model):
    """float32 sums in another order: 1e-5 is promised. Metrics of ranks are averaged, as the trainer does."""
    metrics, weights = sgd_step(0, 1, odd_llama, micro=8, **model)
    counted, files = zip(*(out[name] for out in of_two[0]), strict=True)
    of_two_ranks = mean_metrics([{key: value[0] for key, value in of_rank.items()} for of_rank in counted])
    assert of_two_ranks == pytest.approx({key: value[0] for key, value in metrics.items()}, rel=1e-5, abs=1e-6)
    for file in files:
        torch.testing.assert_close(dict(np.load(file)), weights, rtol=0, atol=1e-5)


def test_a_bad_number_on_one_rank_is_skipped_by_both(odd_llama, of_two):
    before = weights_of(make_engine(odd_llama))
    for out in of_two[0]:
        metrics, weights = out["poisoned"][0], np.load(out["poisoned"][1])
        assert metrics["actor/nonfinite_steps"] == [1]
        assert all((weights[k] == before[k]).all() for k in before)


def test_a_resumed_run_of_two_ranks_is_the_same_to_the_bit(of_two):
    for out in of_two[0]:
        assert out["resumed"][0] == out["straight"][0]
        np.testing.assert_equal(*(dict(np.load(out[name][1])) for name in ("resumed", "straight")))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_continues_with_the_same_loss_on_other_numbers(odd_llama, of_two, ranks):
    results = [other_ranks(0, 1, odd_llama, of_two[1])] if ranks == 1 else run_ranks(
        other_ranks, ranks, odd_llama, of_two[1]
    )  # fmt: skip
    for model in ("straight", "straight lora"):
        losses = np.mean([of_rank[model] for of_rank in results], axis=0)
        straight = np.mean([out[model][0] for out in of_two[0]], axis=0)
        assert losses[0] == pytest.approx(straight[0], abs=1e-5)
        assert losses[1] == pytest.approx(straight[1], abs=1e-3)  # behind an Adam step, which follows signs
    loaded, saved = np.load(f"{of_two[1]}_on{ranks}_full.npz"), np.load(of_two[0][0]["moments"][1])
    assert set(loaded.files) == set(saved.files) and any(np.abs(saved[key]).max() > 0 for key in saved.files)
    assert all((loaded[key] == saved[key]).all() for key in saved.files)  # to the bit: nothing was computed


def test_generators_belong_to_a_number_of_ranks(odd_llama, of_two):
    engine = make_engine(odd_llama)
    seed_before = torch.get_rng_state()
    engine.load_checkpoint(of_two[1])
    assert torch.equal(torch.get_rng_state(), seed_before)


def saved_and_published(rank, world_size, path, root, in_background):
    """Names of the files that this rank hashed while it saved, and while rank 0 published."""
    hashed, own = [], publish._digest
    publish._digest = lambda file, sync=False: hashed.append(file.name) or own(file, sync)
    engine = make_engine(path, async_save=in_background)
    steps(engine, rank, world_size, [0])
    writer = CheckpointWriter(root, 1)
    if rank == 0:
        writer.__enter__()
    host_barrier()
    engine.save_checkpoint(str(writer.path / "actor"), global_step=1)
    while not engine.save_is_finished():
        time.sleep(0.01)
    of_save = sorted(hashed)
    hashed.clear()
    host_barrier()
    if rank == 0:
        (writer.path / "trainer_state.json").write_text("{}")
        writer.__exit__(None, None, None)
    return of_save, hashed


@pytest.mark.parametrize("in_background", [False, True])
def test_every_rank_hashes_its_own_files_and_the_manifest_is_that_of_one_process(odd_llama, tmp_path, in_background):
    (of_first, published), (of_second, nothing) = run_ranks(
        saved_and_published, 2, odd_llama, str(tmp_path), in_background
    )
    assert of_second == ["__1_0.distcp", "__1_0.distcp", "rng_rank_1.safetensors"] and nothing == []
    assert "__0_0.distcp" in of_first and not {*of_first} & {*of_second}
    assert published == ["trainer_state.json"]
    step = tmp_path / "global_step_1"
    written = json.loads((step / publish.MANIFEST).read_text())
    publish.verify_manifest(step)
    publish.write_manifest(step)  # by this process alone
    assert json.loads((step / publish.MANIFEST).read_text()) == written
    assert {entry["file"].rpartition("/")[2] for entry in written["files"]} >= {"__1_0.distcp", ".metadata"}
