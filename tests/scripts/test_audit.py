"""The audit of an upstream release: on a small made-up one, and its reasons file."""

import functools
import inspect
import zipfile
from pathlib import Path

import pytest
import ray
import yaml

from scripts.audit import changes, compat, departures, facts, keys, names, page, values
from scripts.audit.facts import Facts
from scripts.audit.reasons import Reasons, file_of
from scripts.audit.sources import flat, read_release
from scripts.audit_upstream import audit, check_changes, main
from verl.config import aliases
from verl.report.metric_names import all_metrics

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
    entries = names.upstream_names(text, module.endswith("__init__.py"))
    return {f.name: (f.status, f.detail) for f in names.compare_names(module, entries)}


def test_names_are_the_same_differ_are_missing_or_ours_alone():
    findings = found_in(DEVICE)
    assert findings["get_device_name"] == ("same", "")
    assert findings["get_nccl_backend"] == ("same", "")
    assert findings["get_device_id"] == ("differs", "lacks device")
    assert {n for n, (status, _) in findings.items() if status == "missing"} == {
        "Gone", "Gone.size", "Gone.walk", "Gone.left", "Gone.right", "LIMIT"
    }  # fmt: skip
    assert found_in("", "verl/utils/fs.py")["copy_to_local"] == ("ours alone", "")
    assert "_private" not in findings and "lower" not in findings


def test_signatures_are_compared_by_name_order_and_default():
    def diff(theirs, ours):
        return names.difference(parsed(f"def f({theirs}): ..."), parsed(f"def f({ours}): ..."))

    assert diff("a, b=1", "a, b=1") == diff("a, b=X", "a, b=2") == diff("a, *x, **y", "a, *args, **kwargs") == ""
    assert diff("a, b=1", "a, b=2") == "default of b: 1, ours 2"
    assert diff("a, b=None", "a, b") == "default of b: None, ours none"
    assert diff("a, b=X", "a, b") == "default of b: <expression>, ours none"
    assert diff("a, b", "b, a") == "another order" and diff("*, a, b", "*, b, a") == ""
    assert diff("a, **kw", "a, c=3") == "lacks **kwargs; adds c"
    assert diff("a", "a, **kw") == "adds **kwargs" and diff("a", "a, *x") == "adds *args"
    assert diff("a, *args", "a") == "lacks *args"
    assert diff("a, b", "a, *, b") == "b is passed by position or name, ours by name only"
    assert diff("a, /", "a") == "a is passed by position only, ours by position or name"


def test_a_function_is_compared_as_it_is_called():
    plain, awaited = parsed("def f(a): ..."), parsed("async def f(a): ...")
    assert names.difference(awaited, plain) == "is awaited, ours not"
    assert names.difference(plain, awaited) == "is not awaited, ours is"
    assert names.difference(awaited, awaited) == "" and names.difference(plain, None) == "a function, ours is none"


def parsed(text):
    return names.upstream_names(text, False)["f"]


async def positional(a, /, b, *args, c=1, **kwargs):
    """Of ours."""


@functools.cache
def cached(a, b=2): ...


async def stream(a):
    yield a


def test_signatures_of_ours_are_read_as_those_of_a_text():
    ours = names.our_names(__name__, set())
    assert ours["positional"] == parsed("async def f(a, /, b, *x, c=1, **y): ...")
    assert ours["cached"] == ours["rebound"] == parsed("def f(a, b=2): ...")
    assert ours["stream"] == parsed("async def f(a): yield a")
    assert ours["ROOT"] is None


rebound = functools.partial(cached.__wrapped__)


class Actor:
    def act(self, a=1): ...


def test_what_ray_adds_to_a_class_made_remote_is_left_out():
    ray.remote(Actor)
    assert names.ADDED_BY_RAY in inspect.signature(Actor.act).parameters
    assert names.our_names(__name__, {"Actor"})["Actor.act"] == parsed("def f(a=1): ...")


def test_a_function_that_only_raises_is_missing():
    texts = "def patch_vlm_for_ulysses_input_slicing(model_class): ...\ndef repeat_kv(hidden_states, n_rep): ..."
    findings = found_in(texts, "verl/models/transformers/monkey_patch.py")
    assert findings["patch_vlm_for_ulysses_input_slicing"] == ("missing", "")
    assert findings["repeat_kv"] == ("same", "")


def test_inherited_lazy_and_instance_names_of_ours_count():
    findings = found_in("class CriticWorker:\n    def init_model(self): ...\n    def world_size(self): ...\n",
                     "verl/workers/fsdp_workers.py")  # fmt: skip
    assert [findings[n][0] for n in ("CriticWorker", "CriticWorker.init_model")] == ["same", "same"]
    assert found_in("from verl.protocol import DataProto", "verl/__init__.py")["DataProto"][0] == "same"


def test_keys_and_defaults_are_compared_in_our_composed_tree():
    theirs = "data:\n  path: x\n  prompt_key: prompt\n  gone: 1\nray: {}\ntrainer:\n  dry_run: 0\n"
    findings = {f.name: f for f in keys.compare_trees(keys.upstream_keys({"t.yaml": theirs}, "t.yaml"), "evaluation")}
    assert findings["data.prompt_key"].status == "same"
    assert (findings["data.path"].status, findings["data.path"].detail) == (
        "differs", "default x, ours outputs/generation.parquet"
    )  # fmt: skip
    assert findings["data.gone"].status == findings["ray"].status == "missing"
    assert findings["trainer.dry_run"].status == "differs"  # no number
    assert findings["custom_reward_function.path"].status == "ours alone"
    assert flat({"a": {"b": 1, "c": {}}}) == {"a.b": 1, "a.c": {}}


def test_numbers_are_compared_as_numbers():
    theirs = "optim:\n  lr: 1e-5\n  weight_decay: 1e-1\n  clip_grad: 1\n"
    findings = {f.name: f for f in keys.compare_trees(keys.upstream_keys({"t.yaml": theirs}, "t.yaml"), "sft_trainer")}
    assert findings["optim.lr"].status == findings["optim.clip_grad"].status == "same"
    assert findings["optim.weight_decay"].detail == "default 0.1, ours 0.01"


def test_metric_names_are_extracted_from_texts_and_formats():
    text = 'm = {"actor/pg_loss": 1, f"critic/score/{x}": 2, "not/a/metric": 3, "actor/new_one": 4, "actor": 5}'
    assert keys.metric_names(text) == {"actor/pg_loss", "critic/score/*", "actor/new_one"}
    theirs = keys.metrics_of({"verl/trainer/a.py": text})
    findings = {f.name: f.status for f in keys.compare_metric_names(theirs)}
    named = [findings[name] for name in ("actor/pg_loss", "critic/score/*", "actor/new_one")]
    assert named == ["same", "same", "missing"]
    assert findings["spd/hit_limit"] == "ours alone" and len(findings) == len(all_metrics()) + 1


@pytest.fixture
def release(tmp_path):
    trees = {file: "a: 1\n" for file in keys.TREES}
    return read_release(wheel(tmp_path, **{"verl/utils/device.py": DEVICE + SPY, "verl/other.py": SPY}, **trees))


def test_a_release_is_read_as_text_and_never_run(release, tmp_path, monkeypatch, capsys):
    reasons = tmp_path / "reasons.yaml"
    listed = {"modules": ["verl/utils/device.py"], "reasons": {"verl.utils.device:Gone*": "Not needed.", "*:a": "Old."}}
    reasons.write_text(yaml.safe_dump(listed))
    monkeypatch.setattr("scripts.audit_upstream.Reasons", lambda _: Reasons(reasons))
    monkeypatch.setattr("scripts.audit_upstream.check_changes", lambda *_: [])
    monkeypatch.setattr(compat, "misplaced", lambda *_: [])
    given = ["--upstream", str(tmp_path / "verl-9.9-py3-none-any.whl")]
    assert main(given) == 1
    diff = capsys.readouterr().out
    assert "missing without a reason: verl.utils.device:LIMIT" in diff and "Gone.walk" not in diff
    assert "differs without a reason: verl.utils.device:get_device_id  lacks device" in diff
    listed["reasons"] |= dict.fromkeys(("verl.utils.device:LIMIT", "verl.utils.device:get_device_id"), "Not needed.")
    reasons.write_text(yaml.safe_dump(listed))
    assert main([*given, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "lacks device  [Not needed.]" in shown and "pathlib" not in shown
    assert "| names importers rely on | 2 | 0 | 1 | 6 | 0 |" in shown
    listed["reasons"]["verl.utils.device:get_device_name"] = "It is there."
    reasons.write_text(yaml.safe_dump(listed))
    assert main(given) == 1 and "excuses nothing any more" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("version", "modules"), {"0.7.0": 71, "0.9.1": 16}.items())
def test_every_reason_is_a_sentence(version, modules):
    reasons = Reasons(file_of(version))
    assert len(reasons.modules) == modules == len(set(reasons.modules))
    for reason in reasons.reasons:
        assert reason.text.endswith(".") and len(reason.text) > 10, reason
        assert ":" in reason.pattern
    assert yaml.safe_load(file_of(version).read_text())["modules"] == reasons.modules


def test_a_stored_list_says_what_the_files_say(release, tmp_path):
    facts = Facts.of(release)
    (tmp_path / "list.json").write_text(facts.text())
    assert Facts.load(tmp_path / "list.json") == facts
    text = "def f(a, /, b, *args, c=1, **kw): ...\nasync def g(*, a, b=X): ...\nLIMIT = 3\n"
    facts = Facts.of({"verl/a.py": text})
    (tmp_path / "list.json").write_text(facts.text())
    assert Facts.load(tmp_path / "list.json") == facts
    assert facts.modules["verl/a.py"]["g"] == parsed("async def f(*, a, b=Y): ...")


@pytest.mark.parametrize("version", facts.VERSIONS)
def test_every_difference_from_a_release_has_its_reason_and_the_pages_are_fresh(version, capsys, monkeypatch):
    """Also the departures, and what the pages name; against the stored list: without the release and a network."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network is used"))
    code = main(["--release", version])
    assert code == 0, capsys.readouterr().out


def test_of_0_7_all_but_twenty_names_are_there_or_out_of_scope():
    release = Facts.load(facts.stored("0.7.0"))
    rows = audit(release, Reasons())["names importers rely on"]
    missing = [row.reason for row in rows if row.finding.status == "missing"]
    left_out = [reason for reason in missing if "out of scope" in reason or reason.startswith("Left out")]
    assert len(missing) - len(left_out) <= 20 and len(left_out) < 200 and all(missing)


def test_another_name_of_a_key_is_no_lack():
    assert all(keys.renamed(alias.old, "ppo_trainer") == (alias.new or "accepted") for alias in aliases.RL)
    assert keys.renamed("nothing.like.it", "ppo_trainer") is None


def test_the_page_is_read_with_care(tmp_path):
    (tmp_path / "Makefile").write_text("demo: env\n")
    (tmp_path / "there.py").write_text("def here(for_seconds): return {'cpu': 'page.html', 'two words': 1}\n")
    right = (
        "`make demo` `there.py` `trainer.device` `device` `trainer.device=cpu` `trainer.retry=3` `actor/pg_loss` "
        "`timing_s/...` `python -m there` `there.here` `here(for_seconds)` `page.html` `_seconds` `{'device': 'cpu'}`"
    )
    wrong = {
        "make gone": "the Makefile does not have this target", "gone/there.py": "the file does not exist",
        "gone.html": "the file does not exist",
        "trainer.{device,gone}": "the key does not exist", "actor/gone": "the metric does not exist",
        "python -m gone": "the module does not exist",
        "there.her": "the code has no 'her'", "x.y": "the code has no 'x'",
        "trainer.device=gpu": "the code has no 'gpu'", "two": "the code has no 'two'",
        "_minutes": "the code has no '_minutes'",
        "3": "neither a file, key, metric, command nor a name of the code",
    }  # fmt: skip
    file = tmp_path / "CHANGES.md"
    file.write_text(" ".join([right, *(f"`{piece}`" for piece in wrong)]))
    diff = [f"`{piece.replace('{device,gone}', 'gone')}`: {lack}" for piece, lack in wrong.items()]
    assert changes.unfounded(file, {"trainer.device", "trainer.retry"}, tmp_path) == diff


def test_additions_name_an_existing_file_and_omissions_are_absent(tmp_path):
    (tmp_path / "Makefile").write_text("demo: env\n")
    (tmp_path / "there.py").write_text("def here(): ...\n")
    (tmp_path / "CHANGES.md").write_text(
        "## What this project adds\n\n| what | where |\n|---|---|\n| a | `there.py` |\n| b | somewhere |\n\n"
        "## Left out on purpose\n\nMegatron, `here`, `gone`.\n"
    )
    assert changes.unfounded(tmp_path / "CHANGES.md", set(), tmp_path) == [
        "`here` is left out, and the code has it", "'b' does not exist: name its file or folder",
    ]  # fmt: skip


def test_old_tables_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "unfounded", lambda *_: ["a"])
    monkeypatch.setattr(departures, "unfounded", lambda *_: ["b"])
    row = page.Row(names.Finding("m", "f", "differs", "adds a"), "A reason.", True)
    file = tmp_path / "verl_names.md"
    tables = (page.markdown({"names": [row]}), page.reasons_table({"names": [row]}), compat.table())
    file.write_text("Told:\n\n" + "\n".join(tables))
    nothing = Facts({}, {}, set())
    assert check_changes(tmp_path, nothing, {"names": [row]}) == ["a", "b"]
    (old,) = check_changes(tmp_path, nothing, {"names": [row, row]})[2:]
    assert old == "the tables of the audit are outdated; --update writes them"


def test_import_paths_are_those_of_verl(monkeypatch):
    assert "| verl.base_config | verl.config.base |" in compat.table().splitlines()
    theirs = dict.fromkeys(f"{path.replace('.', '/')}.py" for path in compat.rows())
    assert compat.misplaced(theirs) == []
    monkeypatch.setitem(compat.paths.MODULES, "verl.not_there", "verl.config.base")
    assert compat.misplaced(theirs) == ["verl.compat.table has verl.not_there, and verl has no module of that name"]


def test_what_differs_has_a_reason_and_what_is_missing_where_importers_rely_on_it():
    gone, other = names.Finding("m", "f", "missing"), names.Finding("m", "g", "differs", "adds a")
    rows = [page.Row(f, why, required) for f in (gone, other) for why in ("", "Why.") for required in (True, False)]
    assert page.unexplained(rows) == [rows[0], rows[4], rows[5]]
    assert page.reasons_table({"names": rows}).splitlines()[2:] == ["| Why. | m (3) |"]


@pytest.mark.parametrize("version", ["0.7.0", "0.9.1"])
def test_results_are_those_of_the_release_or_differ_for_a_reason(version, monkeypatch):
    assert values.unexplained(version) == [] and values.unexplained("9.9") == []
    found = values.results()
    monkeypatch.setattr(values, "results", lambda: {**found, "kl_penalty mse": 1.0})
    monkeypatch.setitem(values.REASONS, "agg_loss token-mean", ((version,), "no longer"))
    differs, unneeded = values.unexplained(version)
    assert differs.startswith(f"kl_penalty mse: verl {version} gives [[0.045,")
    assert differs.endswith("this tree 1.0, without a reason") and "'agg_loss token-mean' excuses nothing" in unneeded
