"""The departures of docs/migrating.md that are neither compared as defaults nor shown by another test."""

from pathlib import Path

import pytest
import yaml
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForTokenClassification

from scripts.audit import departures
from scripts.audit.keys import our_keys
from tests.helpers.engines import make_engine
from verl.utils.model import create_huggingface_critic

ROOT = Path(__file__).resolve().parents[2]
MODE, TEST = "ppo_trainer:actor_rollout_ref.rollout.mode", "tests/test_a.py::test_b"
UPSTREAM = {"verl/trainer/config/_generated_ppo_trainer.yaml": {"actor_rollout_ref.rollout.mode": "async"}}


def errors_of(folder, row, ground, release=None):
    """What is wrong with this one row, whose ground stands in departures.yaml."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "tests" / "test_a.py").write_text("def test_b(): ...\n")
    (folder / "page.md").write_text(f"## Where it departs\n\n| what | |\n|---|---|\n{row}\n\n## Next\n| x |\n")
    (folder / "grounds.yaml").write_text(yaml.safe_dump(ground))
    return departures.unfounded(folder / "page.md", folder, release, folder / "grounds.yaml")


@pytest.mark.parametrize(("row", "ground", "wrong"), [
    ("| mode | `async` only | `sync`; more | why |", {"mode": MODE}, None),
    ("| mode | `async` only | `sync` | why |", {"mode": [MODE, TEST]}, None),
    ("| mode | async | `async` | why |", {"mode": MODE}, "'`async`', which does not begin with the default, sync"),
    ("| mode | `async` only | synchronous | why |", {"mode": MODE}, "says 'synchronous', which does not begin"),
    ("| mode | `sync` | `sync` | why |", {"mode": MODE}, "'`sync`', which does not begin with the default, async"),
    ("| mode | a | b | why |", {"mode": f"{MODE}l"}, f"names a key that is not there: {MODE}l"),
    ("| mode | a | b | why |", {"mode": "no_trainer:mode"}, "names a key that is not there: no_trainer:mode"),
    ("| mode | a | b | why |", {"mode": f"{TEST}_or_so"}, f"a test that is not there: {TEST}_or_so"),
    ("| mode | a | b | why |", {"mode": "tests/test_x.py::test_y"}, "that is not there: tests/test_x.py::test_y"),
    ("| mode | a | b | why |", {}, "row 'mode' has no ground: enter the keys"),
    ("| mode | a | b |", {"mode": TEST}, "row 'mode' has 3 cells, not 4"),
    ("| mode | a | b | why |", {"mode": TEST, "gone": TEST}, "'gone' is not a row of the table any more"),
])  # fmt: skip
def test_a_row_is_checked(tmp_path, row, ground, wrong):
    errors = errors_of(tmp_path, row, ground, UPSTREAM)
    assert errors == [] if wrong is None else len(errors) == 1 and wrong in errors[0], errors


def test_several_defaults_stand_in_one_cell(tmp_path):
    keys = [f"spd_trainer:actor_rollout_ref.actor.{name}" for name in ("optim.betas", "entropy_coeff")]
    assert errors_of(tmp_path, "| a | - | [0.9, 0.95], 0.3, in words | |", {"a": keys}) == []
    assert len(errors_of(tmp_path, "| a | - | [0.9, 0.95], 0.35 | |", {"a": keys})) == 1
    alike = [f"ppo_trainer:actor_rollout_ref.actor.clip_ratio_{side}" for side in ("low", "high")]
    assert errors_of(tmp_path, "| a | - | null, in words | |", {"a": alike}) == []


def test_a_value_head_has_no_dropout(tiny_llama):
    assert AutoModelForTokenClassification.from_pretrained(tiny_llama, num_labels=1).dropout.p == 0.1
    assert create_huggingface_critic(tiny_llama).dropout.p == 0.0


def test_both_strategies_mean_fsdp2(tiny_llama):
    for strategy in ("fsdp", "fsdp2"):
        assert isinstance(make_engine(tiny_llama, engine={"strategy": strategy}).module, FSDPModule)


def test_sft_names_its_optimizer_as_rl_does():
    of_sft, of_rl = our_keys("sft_trainer"), our_keys("ppo_trainer")
    for name in ("optimizer", "optimizer_impl", "override_optimizer_config"):
        assert of_sft[f"optim.{name}"] == of_rl[f"actor_rollout_ref.actor.optim.{name}"]
