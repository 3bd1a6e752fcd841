"""The audit of an upstream release: on a small made-up one, and its reasons file."""

import zipfile
from pathlib import Path

import pytest
import yaml

from scripts.audit import changes, keys, names, page
from scripts.audit.reasons import FILE, Reasons
from scripts.audit.sources import flat, read_release
from scripts.audit_upstream import known_keys, main
from verl.utils.metric.names import METRICS

ROOT = Path(__file__).resolve().parents[2]
SPY = "\nimport pathlib\npathlib.Path('RAN').touch()\n"
DEVICE = '''
def get_device_name(): ...
def get_device_id(device: int = 3): ...
def _private(): ...
if True:
    def get_nccl_backend(): ...
class Gone:
    size: int = 1
    def walk(self, step, *, far=False): ...
    @property
    def left(self): ...
    @property
    def right(self): ...
LIMIT = 3
lower = 4
'''


def wheel(folder, **files):
    """A release with these files; importing one of them would leave a trace."""
    path = folder / "verl-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text.replace("RAN", str(folder / "ran")))
    return path


def found_in(text, module="verl/utils/device.py"):
    return {f.name: (f.status, f.detail) for f in names.compare_module(module, text)}


def test_names_are_the_same_differ_are_missing_or_ours_alone():
    found = found_in(DEVICE)
    assert found["get_device_name"] == ("same", "")
    assert found["get_nccl_backend"] == ("same", "")
    assert found["get_device_id"] == ("differs", "lacks device")
    assert {n for n, (status, _) in found.items() if status == "missing"} == {
        "Gone", "Gone.size", "Gone.walk", "Gone.left", "Gone.right", "LIMIT"
    }  # fmt: skip
    assert found["auto_set_device"] == ("ours alone", "")
    assert "_private" not in found and "lower" not in found


def test_signatures_are_compared_by_name_order_and_default():
    def told(theirs, ours):
        parse = lambda text: names.upstream_names(f"def f({text}): ...", False)["f"]  # noqa: E731
        return names.difference(parse(theirs), parse(ours))

    assert told("a, b=1", "a, b=1") == told("a, b=X", "a, b=2") == told("a, *args", "a") == ""
    assert told("a, b=1", "a, b=2") == "default of b: 1, ours 2"
    assert told("a, b=None", "a, b") == "default of b: None, ours none"
    assert told("a, b", "b, a") == "another order"
    assert told("a, **kw", "a, c=3") == "adds c; lacks **kwargs"


def test_inherited_lazy_and_instance_names_of_ours_count():
    found = found_in("class CriticWorker:\n    def init_model(self): ...\n    def world_size(self): ...\n",
                     "verl/workers/fsdp_workers.py")  # fmt: skip
    assert [found[n][0] for n in ("CriticWorker", "CriticWorker.init_model")] == ["same", "same"]
    assert found_in("from verl.protocol import DataProto", "verl/__init__.py")["DataProto"][0] == "same"


def test_keys_and_defaults_are_compared_in_our_composed_tree():
    theirs = "data:\n  path: x\n  prompt_key: prompt\n  gone: 1\nray: {}\n"
    found = {f.name: f for f in keys.compare_keys({"t.yaml": theirs}, "t.yaml", "evaluation")}
    assert found["data.prompt_key"].status == "same"
    assert (found["data.path"].status, found["data.path"].detail) == (
        "differs", "default x, ours outputs/generation.parquet"
    )  # fmt: skip
    assert found["data.gone"].status == found["ray"].status == "missing"
    assert found["custom_reward_function.path"].status == "ours alone"
    assert flat({"a": {"b": 1, "c": {}}}) == {"a.b": 1, "a.c": {}}


def test_metric_names_are_found_in_texts_and_formats():
    text = 'm = {"actor/pg_loss": 1, f"critic/score/{x}": 2, "not/a/metric": 3, "actor/new_one": 4, "actor": 5}'
    assert keys.metric_names(text) == {"actor/pg_loss", "critic/score/*", "actor/new_one"}
    found = {f.name: f.status for f in keys.compare_metrics({"verl/trainer/a.py": text})}
    assert (found["actor/pg_loss"], found["critic/score/*"], found["actor/new_one"]) == ("same", "same", "missing")
    assert found["spd/hit_limit"] == "ours alone" and len(found) == len(METRICS) + 1


@pytest.fixture
def release(tmp_path):
    trees = {file: "a: 1\n" for file in keys.TREES}
    return read_release(wheel(tmp_path, **{"verl/utils/device.py": DEVICE + SPY, "verl/other.py": SPY}, **trees))


def test_a_release_is_read_as_text_and_never_run(release, tmp_path, monkeypatch, capsys):
    reasons = tmp_path / "reasons.yaml"
    listed = {"modules": ["verl/utils/device.py"], "reasons": {"verl.utils.device:Gone*": "Not needed.", "*:a": "Old."}}
    reasons.write_text(yaml.safe_dump(listed))
    monkeypatch.setattr("scripts.audit_upstream.Reasons", lambda: Reasons(reasons))
    monkeypatch.setattr(changes, "unfounded", lambda *_: [])
    given = ["--upstream", str(tmp_path / "verl-9.9-py3-none-any.whl"), "--html", str(tmp_path / "out" / "audit.html")]
    assert main(given) == 1
    told = capsys.readouterr().out
    assert "missing without a reason: verl.utils.device:LIMIT" in told and "Gone.walk" not in told
    listed["reasons"]["verl.utils.device:LIMIT"] = "Not needed."
    reasons.write_text(yaml.safe_dump(listed))
    assert main(given) == 0
    assert "| names importers rely on | 2 | 1 | 6 | 0 |" in capsys.readouterr().out
    listed["reasons"]["verl.utils.device:get_device_name"] = "It is there."
    reasons.write_text(yaml.safe_dump(listed))
    assert main(given) == 1 and "excuses nothing any more" in capsys.readouterr().out
    written = (tmp_path / "out" / "audit.html").read_text()
    assert "Not needed." in written and "lacks device" in written and "pathlib" not in written
    assert not (tmp_path / "ran").exists()


def test_the_reasons_are_sentences_and_planned_only_where_it_may_be():
    reasons = Reasons()
    assert len(reasons.modules) == 71 == len(set(reasons.modules))
    for reason in reasons.reasons:
        assert reason.text.endswith(".") and len(reason.text) > 10, reason
        assert ":" in reason.pattern
    assert yaml.safe_load(FILE.read_text())["modules"] == reasons.modules


def test_planned_is_no_reason_for_anything_else(tmp_path):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"modules": [], "reasons": {"verl.x:*": "planned: soon."}}))
    with pytest.raises(ValueError, match="may not be planned only"):
        Reasons(tmp_path / "r.yaml")


def test_what_changes_md_names_is_in_the_tree():
    assert changes.unfounded(ROOT / "CHANGES.md", known_keys()) == []


def test_changes_md_is_read_with_care(tmp_path):
    (tmp_path / "Makefile").write_text("demo: env\n")
    (tmp_path / "there.py").write_text("")
    (tmp_path / "CHANGES.md").write_text(
        "`make demo` `make gone` `there.py` `gone/there.py` `trainer.{device,gone}` `actor/pg_loss` `actor/gone` `x.y`"
    )
    assert changes.unfounded(tmp_path / "CHANGES.md", {"trainer.device"}) == [
        "`make gone`: the Makefile has no such target", "`gone/there.py`: no such file",
        "`trainer.gone`: no such key", "`actor/gone`: no such metric",
    ]  # fmt: skip


def test_a_missing_name_counts_only_where_importers_rely_on_it():
    gone = names.Finding("m", "f", "missing")
    rows = [page.Row(gone, "", True), page.Row(gone, "why", True), page.Row(gone, "", False)]
    assert page.unexplained(rows) == rows[:1]
