"""What callers of verl 0.7.0 see: one test for each behaviour that code written for it relies on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl import DataProto
from verl.trainer.ppo import core_algos


def test_a_replaced_table_of_estimators_is_looked_up(monkeypatch):
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", {"gae": lambda x: x * 2})
    assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GAE)(5) == 10

    @core_algos.register_adv_est("mine")
    def mine():
        return 1

    assert core_algos.ADV_ESTIMATOR_REGISTRY["mine"] is mine and core_algos.get_adv_estimator_fn("mine") is mine
    with pytest.raises(ValueError, match="mine"):
        core_algos.register_adv_est("mine")(lambda: 2)
    with pytest.raises(ValueError, match="nobody"):
        core_algos.get_adv_estimator_fn("nobody")


def test_a_replaced_table_of_losses_is_looked_up(monkeypatch):
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})
    core_algos.register_policy_loss("mine")(print)
    assert core_algos.get_policy_loss_fn("mine") is print
    monkeypatch.undo()
    with pytest.raises(ValueError, match="mine"):
        core_algos.get_policy_loss_fn("mine")


def test_rollout_skip_takes_mocks(tmp_path):
    from verl.utils.rollout_skip import RolloutSkip

    config = MagicMock()
    config.actor_rollout_ref.rollout = {"n": 2, "skip_dump_dir": str(tmp_path / "dump")}
    config.data = {"gen_batch_size": 4}
    group, generated = MagicMock(), []

    def generate(batch):
        generated.append(batch)
        return DataProto.from_dict({"responses": torch.ones(8, 1)})

    group.generate_sequences = generate
    skip = RolloutSkip(config, group)
    assert (skip.n, skip.gbs, skip.dumped_dir) == (2, 4, tmp_path / "dump") and skip._rollout_wg is group
    skip.wrap_generate_sequences()
    first, second = group.generate_sequences(MagicMock()), group.generate_sequences(MagicMock())
    assert len(generated) == 1 and skip.curr_path_dump.exists()
    assert torch.equal(first.batch["responses"], second.batch["responses"])


def test_rollout_skip_takes_plain_dictionaries_without_keys(tmp_path):
    from verl.utils.rollout_skip import RolloutSkip

    skip = RolloutSkip({"actor_rollout_ref": {"rollout": {"n": 3}}, "data": {"train_batch_size": 5}}, MagicMock())
    assert (skip.n, skip.gbs) == (3, 5)


CASES = {"inputs": ["1\n", "2\n"], "outputs": ["1", "5"]}


def test_a_replaced_sandbox_call_answers_the_cases(monkeypatch):
    from verl.utils.reward_score.sandbox_fusion import utils

    asked = []

    def call(**request):
        asked.append(request["stdin"])
        ran = {"status": "Finished", "return_code": 0, "stdout": request["stdin"], "stderr": ""}
        return {"status": "Success", "run_result": ran}, None

    monkeypatch.setattr(utils, "call_sandbox_api", call)
    results, reports = utils.check_correctness("http://nowhere", CASES, "print(input())")
    assert results == [True, False] and sorted(asked) == ["1\n", "2\n"] and reports[0]["passed"]
    monkeypatch.setattr(utils, "call_sandbox_api", lambda **request: (None, "no service"))
    results, reports = utils.check_correctness("http://nowhere", CASES, "print(input())")
    assert results == [-1, -1] and "no service" in reports[1]["api_request_error"]


@pytest.mark.parametrize("cases", [None, {}, {"inputs": ["1"]}])
def test_without_cases_there_is_a_report_of_the_error(cases):
    from verl.utils.reward_score.sandbox_fusion.utils import check_correctness

    results, reports = check_correctness("http://nowhere", cases, "print(1)")
    assert results == [-1] and "error" in reports[0]


def test_assign_non_tensor_returns_the_batch_and_keeps_wrapped_values():
    from verl.utils import tensordict_utils

    batch = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    stack = NonTensorStack.from_list([NonTensorData(x) for x in ("x", "y")])
    same = tensordict_utils.assign_non_tensor(batch, one=NonTensorData("v", batch_size=[2]), many=stack, rows=[1, 2])
    assert same is batch
    assert batch["one"] == "v" and batch["many"] == ["x", "y"] and tensordict_utils.get(batch, "rows") == [1, 2]


def test_strided_nested_tensors_serialize():
    from verl.protocol import deserialize_tensordict, serialize_tensordict

    nested = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.strided)
    batch = TensorDict({"n": nested}, batch_size=[2])
    back = deserialize_tensordict(serialize_tensordict(batch))["n"]
    assert back.layout == torch.strided and [x.tolist() for x in back.unbind()] == [[0, 1], [0, 1, 2]]


def test_union_of_batches_fills_the_first():
    from verl.protocol import union_tensor_dict

    first = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    both = union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, batch_size=[2]))
    assert both is first and set(first.keys()) == {"a", "b"}
    with pytest.raises(AssertionError):
        union_tensor_dict(first, TensorDict({"b": torch.zeros(2)}, batch_size=[2]))


def test_two_batch_dimensions_take_no_non_tensors():
    tensors = {"a": torch.zeros(2, 3)}
    assert DataProto.from_dict(tensors, num_batch_dims=2).batch.batch_size == (2, 3)
    with pytest.raises(AssertionError):
        DataProto.from_dict(tensors, {"b": np.array(["x", "y"], dtype=object)}, num_batch_dims=2)


def test_a_batch_may_have_no_non_tensors():
    data = DataProto(batch=TensorDict({"a": torch.zeros(2)}, batch_size=[2]), non_tensor_batch=None)
    assert data.non_tensor_batch == {} and len(data) == 2


def test_object_columns_of_lists_are_cut():
    lists = np.empty(2, dtype=object)
    lists[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    data = DataProto.from_dict({"a": torch.zeros(2, 4)}, {"l": lists})
    cut = data.unfold_column_chunks(2, split_keys=["a", "l"])
    assert cut.non_tensor_batch["l"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] and cut.batch["a"].shape == (4, 2)


def test_shared_sequences_need_batches_without_padding():
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp", ulysses_sequence_parallel_size=2, rollout_n=1, ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=1,
    )  # fmt: skip
    config.validate(2, 4, {"use_remove_padding": True})
    config.validate(2, 4, {})  # as HFModelConfig
    with pytest.raises(ValueError, match="Set actor_rollout_ref.model.use_remove_padding=true"):
        config.validate(2, 4, {"use_remove_padding": False})


def test_nested_objects_of_a_model_config_are_kept():
    from verl.utils.model import update_model_config

    nested = SimpleNamespace(a=1, b=2)
    config = SimpleNamespace(nested=nested, scale={"x": 1}, plain=0)
    update_model_config(config, {"nested": {"a": 5}, "scale": {"y": 2}, "plain": 3})
    assert config.nested is nested and (nested.a, nested.b) == (5, 2)
    assert config.scale == {"y": 2} and config.plain == 3


def test_the_registry_of_managers_returns_what_was_registered(monkeypatch):
    from verl.workers.reward_manager import BatchRewardManager, registry

    monkeypatch.setitem(registry.REWARD_MANAGER_REGISTRY, "first", "FirstManager")
    assert registry.get_reward_manager_cls("first") == "FirstManager"
    assert registry.get_reward_manager_cls("batch") is BatchRewardManager
    with pytest.raises(ValueError, match="nobody.*named by .*external_lib or VERL_USE_EXTERNAL_MODULES"):
        registry.get_reward_manager_cls("nobody")


def test_tables_of_another_mesh_are_taken_over():
    from verl.single_controller.base import Worker

    worker = object.__new__(Worker)
    worker._rank = 0
    worker._dispatch_dp_rank, worker._collect_dp_rank = {}, {}
    Worker.set_dispatch_collect(worker, "rollout", {"infer": 3}, {"infer": True})
    assert worker._dispatch_dp_rank == {"rollout": 3} and worker._collect_dp_rank == {"rollout": True}


@pytest.fixture
def interaction():
    from verl.interactions.gsm8k_interaction import Gsm8kInteraction

    return Gsm8kInteraction({"name": "gsm8k"})


def test_a_message_without_content_counts_as_empty(interaction):
    async def turn():
        name = await interaction.start_interaction(ground_truth="2")
        return await interaction.generate_response(name, [{"role": "user", "content": "1 + 1"}, {"role": "assistant"}])

    ends, _, score, _ = asyncio.run(turn())
    assert not ends and score == 0.0


def test_the_end_of_an_unknown_interaction_is_a_key_error(interaction):
    with pytest.raises(KeyError):
        asyncio.run(interaction.finalize_interaction("nobody"))


def test_the_base_class_of_interactions_can_be_configured(tmp_path):
    from verl.interactions.utils.interaction_registry import initialize_interactions_from_config

    file = tmp_path / "interactions.yaml"
    entry = "  - name: base\n    class_name: verl.interactions.base.BaseInteraction\n    config: {}\n"
    file.write_text(f"interaction:\n{entry}")
    interactions = initialize_interactions_from_config(str(file))
    assert type(interactions["base"]).__name__ == "BaseInteraction"
    with pytest.raises(NotImplementedError):
        asyncio.run(interactions["base"].generate_response("x", []))


def test_a_class_of_a_missing_module_is_a_module_not_found_error():
    from verl.interactions.utils.interaction_registry import get_interaction_class

    with pytest.raises(ModuleNotFoundError):
        get_interaction_class("no_such_package.Interaction")


def test_a_token_bucket_has_no_last_update_at_first():
    from verl.experimental.reward_loop.reward_manager.limited import AsyncTokenBucket

    bucket = AsyncTokenBucket(rate_limit=10.0)
    assert bucket.last_update is None
    asyncio.run(bucket.acquire(4))
    assert bucket.last_update is not None and bucket.tokens == pytest.approx(6)


def test_a_numina_answer_without_a_box_is_compared_as_text():
    from verl.utils.reward_score import default_compute_score

    assert default_compute_score("numina_olympiads", "42", "42") == 1.0
    assert default_compute_score("numina_olympiads", " $x+1$ ", "x+1") == 1.0
    assert default_compute_score("numina_olympiads", "It is 42 or 41.", "42") == 0.0
    assert default_compute_score("numina_olympiads", "so \\boxed{6/3}", "2") == 1.0


def test_a_samplers_class_is_loaded_before_its_settings_are_checked(tmp_path):
    from verl.trainer.main_ppo import create_rl_sampler

    file = tmp_path / "sampler.py"
    file.write_text("class Wrong:\n    def __init__(self, data_source, data_config):\n        pass\n")
    sampler = {"class_path": str(file), "class_name": "Missing"}
    with pytest.raises(AttributeError, match="Missing"):
        create_rl_sampler({"sampler": sampler, "dataloader_num_workers": 8}, [])
    with pytest.raises(AssertionError, match="Wrong"):
        create_rl_sampler({"sampler": {**sampler, "class_name": "Wrong"}, "dataloader_num_workers": 8}, [])


def test_a_replaced_copy_fetches_what_is_not_local(monkeypatch, tmp_path):
    from verl.utils import fs

    def fetch(source, target):
        Path(target).write_text(f"from {source}")

    monkeypatch.setattr(fs, "copy", fetch)
    assert Path(fs.copy_to_local("hdfs://site/model", cache_dir=str(tmp_path))).read_text() == "from hdfs://site/model"
