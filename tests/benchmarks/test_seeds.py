"""Demos on several seeds: what was measured is kept.

Not covered: the demos themselves.
"""

from benchmarks import seeds


def test_a_seed_is_measured_once(tmp_path, monkeypatch, capfd):
    (tmp_path / "one.py").write_text(
        "import pathlib, sys, time\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir(parents=True)\n"
        "print('works on', sys.argv[sys.argv.index('--seed') + 1], flush=True)\n"
        "time.sleep(0.05)\n"
    )
    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    first = list(seeds.demo_runs("one", "demo"))
    assert [(seed, out.name) for seed, out, _ in first] == [(0, "demo0"), (1, "demo1"), (2, "demo2")]
    assert all(took > 0.05 for *_, took in first)
    assert capfd.readouterr().out.count("works on") == 3
    assert list(seeds.demo_runs("one", "demo")) == first
    output = capfd.readouterr().out
    assert "works on" not in output and output.count("measured before") == 3
