"""The benchmark of the gateway measures what it names, on a few requests."""

import pytest

from benchmarks import environments_gateway

pytestmark = [pytest.mark.benchmark, pytest.mark.process, pytest.mark.slow]


def test_the_rows_of_a_few_requests(monkeypatch):
    for name, value in (("REQUESTS", 5), ("REPETITIONS", 2), ("AGENTS", 4)):
        monkeypatch.setattr(environments_gateway, name, value)
    rows = {row.name: row for row in environments_gateway.run()}
    assert set(rows) == {"gateway_overhead_ms", "gateway_p95_ms_64", "gateway_exact_64"}
    assert rows["gateway_exact_64"].value == 1.0 and rows["gateway_p95_ms_64"].value > 0
