"""How the benchmark of models counts. Not covered: the figures themselves."""

from benchmarks import models
from benchmarks.run import WANTED
from tests.models.checks import REFUSED, STOPS, WORKS
from tests.models.templates import APPENDED, KEPT, SPLIT

WORKING, LIMITED = ({"has": "x", "flat rows": result, "vLLM": WORKS} for result in (WORKS, REFUSED))


def test_refused_families_and_those_that_differ_from_the_table_do_not_count(monkeypatch):
    table = {"a": WORKING, "b": LIMITED, "c": WORKING, "d": WORKING, "e": {**WORKING, "vLLM": STOPS}}
    found = {**table, "c": {"fails": "ValueError: no"}, "d": {**WORKING, "flat rows": "works with padding"}}
    said = []
    monkeypatch.setattr(models, "stored", lambda: table)
    monkeypatch.setattr(models, "families", lambda: found.items())
    monkeypatch.setattr(models, "say", said.append)
    counts = {"families_right": 2, "families_in_vllm": 1, "families_tested": 5}
    assert {row.name: row.value for row in models.family_rows()} == counts
    assert [text.split()[0] for text in said] == ["c", "d"]


def test_refused_templates_and_those_that_cannot_be_tested_do_not_count(monkeypatch):
    results = [(APPENDED, True), (KEPT, True), (SPLIT, True), (REFUSED, True), (APPENDED, False)]
    rows = {str(i): {"result": result, "testable": testable} for i, (result, testable) in enumerate(results)}
    monkeypatch.setattr(models, "templates", lambda: rows.items())
    assert {row.name: row.value for row in models.template_rows()} == {"templates_exact": 3, "templates_tested": 4}


def test_the_bounds_are_those_of_the_rows():
    assert WANTED["templates_exact"] == ("at least", 55) and WANTED["families_right"] == ("at least", 25)
