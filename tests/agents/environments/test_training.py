"""A few steps of GRPO in an environment of each library, with the library's own scores (make test-environments).

tests/examples/test_environment_adapters.py has those whose adapters are examples.
"""

from pathlib import Path

import pytest

from tests.helpers.rl_run import compose_run, metrics_rows
from verl.trainer.main_ppo import TaskRunner

pytestmark = [pytest.mark.environments, pytest.mark.process]
HERE = Path(__file__).parent
ENVIRONMENT = "data__environment__"


def train(
    folder: Path, model: str, name: str, agent: bool = False, files: Path | None = None, error: str = "raise",
    **environment,
) -> list[dict]:  # fmt: skip
    """The metrics of two steps; with `agent` the environment leads the conversations."""
    environment = {"name": name, "size": 16, "val_size": 4, **environment}
    more = {f"{ENVIRONMENT}{key}": value for key, value in environment.items()}
    more["reward_model__error"] = error
    more |= {} if files is None else {"data__train_files": files, "data__val_files": files}
    more |= {"custom_reward_function__path": "null", "trainer__local": "true", "trainer__total_training_steps": 2,
             "trainer__test_freq": 1, "trainer__save_freq": -1, "data__max_prompt_length": 120}  # fmt: skip
    if agent:
        rollout = {"name": "vllm", "mode": "async", "dtype": "float32", "max_num_seqs": 64}
        more |= {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
        more |= {"data__max_response_length": 120}
    TaskRunner().run(compose_run(folder, model, **more))
    rows = metrics_rows(folder)
    assert [row["step"] for row in rows if "actor/grad_norm" in row] == [1, 2]
    return rows


def test_reasoning_gym_trains_on_a_mixture(tmp_path, tiny_llama):
    rows = train(
        tmp_path, tiny_llama, "reasoning_gym", tasks="{chain_sum: 2, letter_counting: 1}", system_prompt="", val_size=8,
        params="{chain_sum: {max_terms: 2, max_digits: 1}}", answer_pattern="(.*)",
    )  # fmt: skip
    sources = {name.split("/")[1] for row in rows for name in row if name.startswith("val-")}
    assert {"chain_sum", "letter_counting"} <= sources
    assert all("reward/answered/mean" in row for row in rows if "critic/score/mean" in row)


def test_verifiers_trains_with_its_reward_and_counts_a_task_that_fails(tmp_path, tiny_llama):
    rows = train(tmp_path, tiny_llama, "verifiers", error="drop", tasks="[tickets]", path=HERE / "tickets.py",
                 params="{tickets: {val: {}}}", val_size=3)  # fmt: skip
    steps = [row for row in rows if "critic/score/mean" in row]
    assert all({"reward/right/mean", "reward/letters/mean"} <= row.keys() for row in steps)
    assert sum(row["training/dropped_samples"] for row in steps) == 4  # of the ticket 13, in one of both steps


def test_verifiers_trains_with_a_tool(tmp_path, tiny_llama):
    rows = train(
        tmp_path, tiny_llama, "verifiers", agent=True, tasks="[lookup]", path=HERE / "lookup.py", size=8, val_size=4,
        params="{lookup: {val: {}}}", max_turns=2,
    )  # fmt: skip
    assert all(row["num_turns/mean"] >= 2 for row in rows if "critic/score/mean" in row)
