"""The rewards' benchmark where a kernel confines nothing. Not covered: the figures themselves."""

from benchmarks import rewards
from verl.reward.sandbox import SandboxUnavailable


def test_what_the_kernel_refuses_is_reported_and_the_other_rows_are_measured(monkeypatch):
    def programs(workers, limits):
        if not limits.unconfined:
            raise SandboxUnavailable("this machine cannot confine programs (user namespace)")
        return [1.0, 2.0, 3.0]

    said = []
    monkeypatch.setattr(rewards, "programs", programs)
    monkeypatch.setattr(rewards, "answers", lambda *asked: [5.0])
    monkeypatch.setattr(rewards, "say", said.append)
    values = {row.name: row.value for row in rewards.run()}
    measured = ("unconfined_runs_per_second_one", "math_answers_per_second_one", "gsm8k_answers_per_second_one")
    assert values == dict(zip(measured, (2.0, 5.0, 5.0), strict=True))
    refused = "is not measured: this machine cannot confine programs (user namespace)"
    assert said[1:] == [f"sandbox_runs_per_second_{how} {refused}" for how in ("one", "all_cores")]
