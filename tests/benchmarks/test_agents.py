"""The benchmark of agent loops at a small size: it runs to its end and gives each figure that is wanted of it."""

import json

import pytest

from benchmarks import agents
from benchmarks.run import WANTED

SMALL = dict(CONVERSATIONS=8, GROUPS=2, SHARED=8, OWN=4, MOST_CALLS=2, SHORTEST=2, LONGEST=4, PROMPT=16, RESPONSE=64,
             REPETITIONS=1, SINGLE_REPETITIONS=1, SINGLE_TOKENS=4, REQUESTS=2)  # fmt: skip
NAMES = {"async_speedup", "async_over_longest_wait", "prefix_hit_rate", "reward_exposed_share", "http_overhead_ms",
         "single_turn_async_ratio", "tools_gain_points"}  # fmt: skip


def test_the_plans_are_drawn_once_and_within_their_limits():
    made = agents.plans()
    assert made == agents.plans() and len(made) == 64
    waits = [seconds for plan in made for seconds, _ in plan.answers]
    assert all(0.1 <= seconds <= 2 for seconds in waits) and max(len(plan.answers) for plan in made) <= 6
    assert all(word[0] == "c" for plan in made for word in [plan.words[-1], *(w for _, w in plan.answers)][:-1])
    assert all([plan.words[-1], *(word for _, word in plan.answers)][-1][0] == "a" for plan in made)


@pytest.mark.benchmark
@pytest.mark.process
def test_every_figure_is_measured(monkeypatch, tmp_path):
    for name, value in SMALL.items():
        assert hasattr(agents, name)
        monkeypatch.setattr(agents, name, value)
    monkeypatch.setattr(agents, "ROOT", tmp_path)
    (tmp_path / "outputs" / "tools_arithmetic").mkdir(parents=True)
    (tmp_path / "outputs" / "tools_arithmetic" / "result.json").write_text(json.dumps({"tools_gain_points": 21.5}))
    rows = {row.name: row for row in agents.run()}
    assert NAMES <= rows.keys() and set(WANTED) >= NAMES
    assert rows["tools_gain_points"].value == 21.5 and 0 <= rows["prefix_hit_rate"].value <= 1
    assert rows["async_speedup"].value > 0 and rows["http_overhead_ms"].repetitions == 1
