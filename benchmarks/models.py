"""Models: chat templates whose conversations are trained token by token, architectures that compute the same."""

from benchmarks.harness import Row, row, say
from tests.models.__main__ import families, templates
from tests.models.checks import REFUSED, WORKS, stored
from tests.models.templates import counted


def count(name: str, value: int, unit: str) -> Row:
    """A number that does not vary."""
    return row(name, [value], unit)


def template_rows() -> list[Row]:
    """Of the templates that can be tested, which are fetched if they are not there."""
    exact, tested = counted(dict(templates()))
    return [count("templates_exact", exact, "templates"), count("templates_tested", tested, "templates")]


def family_rows() -> list[Row]:
    """Right: computes what the stored table says, and is not refused. A family that fails says so."""
    known, right, in_vllm, tested = stored(), 0, 0, 0
    for name, found in families():
        tested += 1
        if found != known.get(name):
            say(f"{name} is not as in the table of tests/models: {found}")
        elif REFUSED not in found.values():
            right += 1
            in_vllm += found["vLLM"] == WORKS
    counts = {"families_right": right, "families_in_vllm": in_vllm, "families_tested": tested}
    return [count(name, value, "families") for name, value in counts.items()]


def run() -> list[Row]:
    """All rows."""
    say(__doc__)
    return [*template_rows(), *family_rows()]
