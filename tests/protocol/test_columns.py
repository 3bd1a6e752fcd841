"""The table of the batch's columns holds what the batch of a real step contains."""

from tests.helpers.rl_run import compose_run, keep_batches
from verl.protocol.columns import COLUMNS
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.run.ray_session import run_here

# Columns of the test's data file, which the data set copies.
OF_THE_DATA = {"prompt"}


def test_columns_of_a_step_have_the_shapes_of_the_table(tiny_llama, tmp_path, monkeypatch, capfd):
    batches = keep_batches(monkeypatch)
    config = compose_run(
        tmp_path, tiny_llama, trainer__local="true", trainer__total_training_steps=1, reward_model__num_workers=0,
        trainer__save_freq=0, actor_rollout_ref__actor__use_kl_loss="true", algorithm__adv_estimator="gae",
        actor_rollout_ref__rollout__calculate_log_probs="true", critic__model__path=tiny_llama,
        critic__ppo_micro_batch_size_per_gpu=8, actor_rollout_ref__rollout__n=2,
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0, capfd.readouterr().err
    (batch,) = batches
    sizes = {"B": len(batch), "P": 12, "R": 6, "T": 18}
    for name, tensor in batch.batch.items():
        column = COLUMNS[name]
        shape = tuple(sizes[letter] for letter in column.shape.strip("[]").split(", "))
        assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{column.dtype}"), name
    assert {"ref_log_prob", "values", "advantages", "rollout_log_probs"} <= set(batch.batch.keys())
    others = set(batch.non_tensor_batch) - OF_THE_DATA
    assert others <= set(COLUMNS) and {"uid", "__extras__", "weights_version"} <= others
    assert all(COLUMNS[name].dtype == "object" for name in others)
