"""The completion store: two processes, first completion wins, keys by model and sampling."""

import contextlib
import multiprocessing as mp
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest

from recipe.spd.rollout.store import Completion, CompletionStore
from recipe.spd.scorer.features import StoreError


def open_store(path, model="m", **sampling):
    return CompletionStore(path, model, {"max_tokens": 8, **sampling})


def count(store):
    return store._db.execute("SELECT count(*) FROM completions").fetchone()[0]


def _write(path, worker, start):
    store = open_store(path)
    start.wait()
    for first in range(0, 200, 20):
        contexts = [(i,) for i in range(first, first + 20)]
        held = store.put_many(contexts, [Completion((worker, i), False) for (i,) in contexts])
        assert all(done.token_ids[1] == i for (i,), done in zip(contexts, held, strict=True))
    store.close()


def test_stored_completions_are_read_also_after_closing(tmp_path):
    path = tmp_path / "deep" / "c.sqlite3"
    store = open_store(path)
    assert store.get_many([(1, 2), (3,)]) == {}
    store.put_many([(3,)], [Completion((7, 70_000), True)])
    store.close()
    assert open_store(path).get_many([(1, 2), (3,)]) == {1: Completion((7, 70_000), True)}


def test_another_model_or_sampling_has_other_keys(tmp_path):
    open_store(tmp_path / "c").put_many([(1,)], [Completion((7,), False)])
    assert open_store(tmp_path / "c", model="other").get_many([(1,)]) == {}
    assert open_store(tmp_path / "c", max_tokens=9).get_many([(1,)]) == {}
    assert count(open_store(tmp_path / "c")) == 1


@pytest.mark.process
def test_two_processes_end_with_one_completion_a_key(tmp_path):
    context = mp.get_context("spawn")
    start = context.Barrier(2)
    workers = [context.Process(target=_write, args=(tmp_path / "c", w, start)) for w in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store = open_store(tmp_path / "c")
    assert count(store) == 200
    held = store.get_many([(i,) for i in range(200)])
    first = store.put_many([(5,)], [Completion((9, 9, 9), True)])[0]
    assert first == held[5] and first.token_ids[1] == 5  # what stands there stays


def test_many_openings_of_a_new_file_at_once(tmp_path):
    def opened(number, start):
        start.wait()
        with contextlib.closing(open_store(tmp_path / f"c{number}")) as store:
            return count(store)

    with ThreadPoolExecutor(4) as threads:
        for number in range(20):
            start = threading.Barrier(4)
            assert list(threads.map(opened, [number] * 4, [start] * 4)) == [0] * 4


def test_many_keys_at_once(tmp_path):
    store, contexts = open_store(tmp_path / "c"), [(i,) for i in range(1201)]
    store.put_many(contexts, [Completion((i,), False) for (i,) in contexts])
    assert {i: c.token_ids for i, c in store.get_many(contexts).items()} == {i: (i,) for i in range(1201)}


def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch):
    mounts = [("/", "ext4"), (str(tmp_path / "shared"), "nfs4"), (str(tmp_path / "shared" / "local"), "xfs")]
    disks = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: disks)
    open_store(tmp_path / "c").close()
    open_store(tmp_path / "shared" / "local" / "c").close()
    with pytest.raises(StoreError, match="shared/c lies on nfs4: .* Name a file on a local disk"):
        open_store(tmp_path / "shared" / "c")


def test_a_file_that_is_not_a_store_is_named(tmp_path):
    (tmp_path / "c").write_text("this is no database, however long one looks at it" * 50)
    with pytest.raises(StoreError, match="spd.rollout.store_path=.*cannot be opened"):
        open_store(tmp_path / "c")
