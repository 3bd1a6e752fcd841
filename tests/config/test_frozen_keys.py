"""Public keys of the trees are frozen: each tree's own keys."""

from pathlib import Path

import pytest

from scripts.audit.keys import OURS, our_keys

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PPO, SFT = TESTS / "config" / "public_keys.txt", TESTS / "trainer" / "sft" / "public_keys.txt"
#: tree -> (file with its own keys, file with those it builds on)
FROZEN = {
    "ppo_trainer": (PPO, None),
    "sft_trainer": (SFT, None),
    "generation": (TESTS / "config" / "generation_keys.txt", PPO),
    "evaluation": (TESTS / "config" / "evaluation_keys.txt", None),
    "fully_async_ppo_trainer": (TESTS / "config" / "async_keys.txt", PPO),
    "one_step_off_ppo_trainer": (TESTS / "config" / "async_keys.txt", PPO),
    "dapo_trainer": (PPO, None),
    "sft_trainer_engine": (SFT, None),  # the same keys with other defaults
    "iterative_refine": (TESTS / "dllm_reasoning" / "public_keys.txt", SFT),
}
ELSEWHERE = {"spd_trainer"}  # test_train_spd_scorer


def taken_over(tree, file, own):
    """Keys of the tree below; generation has the rollout and the model alone, without their prefix."""
    keys = file.read_text().split() if file else []
    if tree == "generation":
        section = "actor_rollout_ref."
        keys = [k.removeprefix(section) for k in keys if k.startswith((f"{section}rollout.", f"{section}model."))]
    return {key for key in keys if not any(k.startswith(f"{key}.") for k in own)}  # an open mapping that is filled


@pytest.mark.parametrize("tree", FROZEN)
def test_public_keys_are_frozen(tree):
    file, below = FROZEN[tree]
    own = file.read_text().split()
    assert own == sorted(set(own)), f"{file.name} is not in order"
    frozen, keys = set(own) | taken_over(tree, below, own), set(our_keys(tree))
    assert not frozen - keys, f"users set these keys: {sorted(frozen - keys)}"
    new = f"add to {file.relative_to(ROOT)}, and to CHANGES.md if users see them: {sorted(keys - frozen)}"
    assert not keys - frozen, new


def test_every_tree_has_a_frozen_list():
    files = [f for place in ("verl/trainer", "recipe/*", "dllm_reasoning") for f in ROOT.glob(f"{place}/config/*.yaml")]
    assert FROZEN.keys() | ELSEWHERE == OURS.keys() == {f.stem for f in files}
