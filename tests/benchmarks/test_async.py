"""The parts of `make bench BENCH=async` at small sizes: each runs to its end and gives its wanted results."""

import importlib

import pytest

from benchmarks import agents, async_speed, run

SMALL = {
    agents: dict(CONVERSATIONS=8, GROUPS=2, SHARED=8, OWN=4, MOST_CALLS=2, SHORTEST=2, LONGEST=4, PROMPT=64,
                 RESPONSE=64),
    async_speed: dict(PROMPTS=4, EPOCHS=1, REPETITIONS=1, THREADS=(1,)),
}  # fmt: skip
SIDES = ("trainer_idle", "server_idle")


@pytest.fixture
def small(monkeypatch, tmp_path):
    for module, values in SMALL.items():
        for name, value in values.items():
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(async_speed, "FOLDER", tmp_path / "speed")


def test_every_part_can_be_run_by_its_name():
    for benchmark in {"async", "environments"}:
        parts = {f"benchmarks.{part}" for part, whole in run.PARTS.items() if whole == benchmark}
        assert parts == {module.__name__ for module in importlib.import_module(f"benchmarks.{benchmark}").MODULES}
    assert set(run.PARTS.values()) == {"async", "environments", "pretrained"}
    assert "async_accuracy_loss" in run.WANTED


@pytest.mark.benchmark
@pytest.mark.process
@pytest.mark.slow
def test_the_speed_of_the_same_samples(small):
    rows = {row.name: row for row in async_speed.run()}
    sides = {f"{kind}_{side}" for kind in ("async", "sync") for side in SIDES}
    assert rows.keys() == {"async_speedup", "async_seconds", "sync1_seconds"} | sides
    assert rows["async_speedup"].value > 0 and all(0 <= rows[side].value <= 1 for side in sides)
    assert {row.name: row for row in async_speed.run()} == rows  # from the files of the first start
