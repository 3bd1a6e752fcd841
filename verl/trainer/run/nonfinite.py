"""Ends a run whose updates are skipped repeatedly."""


class NonFiniteRun(RuntimeError):
    """Too many steps in a row were skipped for a non-finite loss or gradient."""


def count_skipped(counters: dict[str, int], skipped: bool, limit: int, why: str, remedy: str) -> None:
    """Count steps with a skipped update in a row; NonFiniteRun at `limit` (trainer.nonfinite_steps_max).

    `why` ends in "in", the number of steps follows; `remedy` says what happened to the weights and what to do.
    """
    counters["nonfinite_in_row"] = counters["nonfinite_in_row"] + 1 if skipped else 0
    if counters["nonfinite_in_row"] >= limit:
        raise NonFiniteRun(f"{why} {limit} steps in a row (trainer.nonfinite_steps_max); {remedy}")
