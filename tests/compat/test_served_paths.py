"""The import paths of verl that `verl.compat` serves: the very modules, names that can be replaced, `python -m`."""

import importlib
import inspect
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from verl.compat import table

ALIASES = [*table.MODULES.items(), *table.PACKAGES.items()]


@pytest.mark.parametrize(("old", "live"), [pair for pair in ALIASES if pair[0] not in table.NAMES])
def test_a_path_of_one_module_gives_that_very_module(old, live):
    module = importlib.import_module(live)
    assert importlib.import_module(old) is module is sys.modules[live]
    assert module.__name__ == module.__spec__.name == live


@pytest.mark.parametrize("old", table.NAMES)
def test_a_path_of_several_modules_has_their_names(old):
    module = importlib.import_module(old)
    for source in table.NAMES[old]:
        home, _, names = source.partition(":")
        for name in names.split(",") if names != "*" else ():
            here, _, there = name.partition("=")
            assert getattr(module, here) is getattr(importlib.import_module(home), there or here)


def test_modules_below_a_package_that_moved_are_loaded_once():
    from verl.reward.rules import gsm8k
    from verl.utils.reward_score import gsm8k as old

    assert old is gsm8k and pickle.loads(pickle.dumps(old.compute_score)) is gsm8k.compute_score
    assert inspect.getsource(old.compute_score).startswith("def compute_score")
    from verl.agents.tools import function_tool
    from verl.tools.function_tool import FunctionTool

    assert issubclass(FunctionTool, function_tool.FunctionTool) and FunctionTool is not function_tool.FunctionTool
    with pytest.raises(ModuleNotFoundError, match="No module named 'verl.tools.no_tool'"):
        importlib.import_module("verl.tools.no_tool")


def test_what_is_left_out_says_what_to_use():
    for old, instead in table.REMOVED.items():
        with pytest.raises(ModuleNotFoundError, match=instead.split()[0]):
            importlib.import_module(old)


def test_a_loss_aggregation_that_is_replaced_is_used_by_the_losses(monkeypatch):
    from verl.algos import policy_loss
    from verl.trainer.ppo import core_algos

    ones = torch.ones(1, 2)
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    original = core_algos.agg_loss
    monkeypatch.setattr(core_algos, "agg_loss", lambda *args, **kwargs: torch.tensor(7.0))
    assert core_algos.compute_policy_loss_vanilla(ones, ones, ones, ones, "token-mean", config)[0] == 7
    monkeypatch.undo()
    assert policy_loss.agg_loss is core_algos.agg_loss is original
    assert core_algos.compute_policy_loss_vanilla(ones, ones, ones, ones, "token-mean", config)[0] == -1


def test_a_collate_function_and_a_reward_loader_that_are_replaced_are_found(monkeypatch):
    from verl.reward import loading
    from verl.trainer.ppo import data_loading, reward
    from verl.utils.dataset import rl_dataset

    monkeypatch.setattr(rl_dataset, "collate_fn", max)
    assert data_loading.rl_dataset.collate_fn is max
    monkeypatch.setattr(reward, "load_reward_manager", min)
    assert loading.load_reward_manager is min


def test_packages_list_the_names_that_they_offer():
    import verl.trainer.config
    import verl.utils

    assert {"AlgoConfig", "TrainerConfig"} <= set(dir(verl.trainer.config))
    assert verl.trainer.config.AlgoConfig is importlib.import_module("verl.config.algorithm").AlgoConfig
    assert "hf_tokenizer" in dir(verl.utils)
    with pytest.raises(AttributeError, match="module 'verl.utils' has no attribute 'nothing'"):
        verl.utils.nothing  # noqa: B018


@pytest.mark.process
@pytest.mark.parametrize("old", ["recipe.one_step_off_policy.main_ppo", "verl.trainer.sft_trainer"])
def test_an_entry_runs_under_its_old_path(old):
    done = subprocess.run([sys.executable, "-m", old, "--cfg", "job"], capture_output=True, text=True)
    assert done.returncode == 0 and "trainer:" in done.stdout, done.stderr[-2000:]
