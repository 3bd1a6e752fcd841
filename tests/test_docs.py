"""The pages made from the code are what the code says; every metric of a run stands in them."""

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import make_docs
from tests.helpers.documents import tracked
from tests.helpers.rl_run import compose_run, fake_trainer, metrics_rows
from verl import __version__
from verl.report.metric_names import all_metrics, unknown_metrics

ROOT = Path(__file__).resolve().parents[1]


def test_generated_files_are_fresh(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_docs.py", "--check"])
    assert make_docs.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["step", "speculation", "refinement"])
def test_drawn_pictures_keep_their_texts_inside(name):
    picture = ElementTree.parse(ROOT / "docs" / "assets" / f"{name}.svg").getroot()
    width, height = map(int, picture.get("viewBox").split()[2:])
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        wide = len(text.text or "") * 0.6 * int(text.get("font-size"))  # of a wide font
        first = float(text.get("x")) - shift[text.get("text-anchor")] * wide
        assert first >= 0 and first + wide <= width and float(text.get("y")) < height - 5, text.text


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda page: page.name)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page):
    cells = 0  # of the head; 0 outside of tables
    for line in page.read_text().splitlines():
        columns = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not cells or columns in (0, cells), line
        cells = columns


LIMITS = {"migrating": 200, "dllm": 150, "trust": 60}


def test_pages_for_readers_and_entries_of_experiments_are_short():
    lines = {name: (ROOT / "docs" / f"{name}.md").read_text().count("\n") for name in LIMITS}
    assert {name: n for name, n in lines.items() if n > LIMITS[name]} == {}
    entries = re.split(r"^## ", (ROOT / "docs" / "experiments.md").read_text(), flags=re.M)[1:]
    assert [entry.partition("\n")[0] for entry in entries if entry.count("\n") > 40] == [] and len(entries) > 10


def test_the_version_is_that_of_the_newest_release():
    headings = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGES.md").read_text(), re.M)
    assert headings[0] == ("Unreleased", "")
    number, date = headings[1]
    assert re.fullmatch(r" \(\d{4}-\d\d-\d\d\)", date) and __version__ == f"0.7.0+spd.{number}"


@pytest.mark.process
def test_every_metric_of_a_run_has_a_description(tmp_path):
    fake_trainer(compose_run(tmp_path, "unused", trainer__test_freq=1, trainer__total_training_steps=1)).fit()
    names = {name for row in metrics_rows(tmp_path) for name in row if name not in ("step", "fake/rows")}
    assert len(names) > 30
    assert unknown_metrics(sorted(names - {"val-aux/fake/rows"})) == []
    assert unknown_metrics(["actor/pg_los"]) == ["actor/pg_los"]
    assert all(sentence.endswith(".") for sentence in all_metrics().values())


@pytest.mark.process
@pytest.mark.demo
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere():
    built = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((ROOT / "outputs" / "site").glob("*.html"))
    assert len(pages) > 15 and "RayPPOTrainer" in (ROOT / "outputs" / "site" / "api.html").read_text()
    loaded = [url for page in pages for url in re.findall(r'(?:src|rel="stylesheet" href)="([^"]+)"', page.read_text())]
    assert len(loaded) > 30 and not [url for url in loaded if "//" in url]
