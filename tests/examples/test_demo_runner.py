"""What the demos share: how long they say that they will take."""

import pytest

from examples import demo_runner
from examples.spd_arithmetic.demo import BUDGET_S


# 360 + 230 + 130 = 720 seconds: 12 minutes on 2 idle cores, and at least half of them.
@pytest.mark.parametrize(
    ("times", "said", "training"),
    [(1.0, "about 6 to 12 minutes on this machine (a second of work took 1.0 times", 230),
     (2.5, "about 15 to 30 minutes on this machine (a second of work took 2.5 times", 575),
     (0.5, "about 3 to 6 minutes", 230)],
)  # fmt: skip
def test_the_first_line_says_how_long_a_demo_takes_here(monkeypatch, capsys, times, said, training):
    monkeypatch.setattr(demo_runner, "slowdown", lambda: times)
    phases = demo_runner.Phases(BUDGET_S)
    assert capsys.readouterr().out.startswith(said)
    assert phases.budget["training"] == training and phases.budget["set-up"] == BUDGET_S["set-up"]


def test_work_is_measured_in_seconds_of_two_idle_cores(monkeypatch):
    monkeypatch.setattr(demo_runner, "BLOCKS_A_SECOND", 1e9)  # no machine is that fast
    assert demo_runner.slowdown(0.02) > 100
    monkeypatch.setattr(demo_runner, "BLOCKS_A_SECOND", 1e-9)
    assert demo_runner.slowdown(0.02) == 0.5
