"""The sides of spd_transfer, read from the text of a question, are those of the problem behind it."""

import random

from benchmarks.spd_transfer import SIDES
from examples.spd_arithmetic import corpus


def test_sides_follow_the_problem():
    rng, seen = random.Random(0), {name: set() for name in SIDES}
    for _ in range(300):
        problem = corpus.sample_problem(rng)
        kinds = {change.kind for change in problem.changes} | {problem.compare and problem.compare.kind}
        expected = {
            "chains of up to 3 steps": problem.steps <= 3,
            "no sharing and halving": not kinds & {"give", "get", "half"},
            "half of the items": corpus.ITEMS.index(problem.item) % 2 == 0,
        }
        assert {name: inside(corpus.question_text(problem)) for name, inside in SIDES.items()} == expected
        for name, side in expected.items():
            seen[name].add(side)
    assert all(sides == {True, False} for sides in seen.values())
