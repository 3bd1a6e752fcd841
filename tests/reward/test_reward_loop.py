"""verl's reward loop: managers built from the config, Ray workers, and a trainer that uses its managers."""

import asyncio

import pytest
import torch
from omegaconf import OmegaConf

from tests.helpers.columns import object_columns
from tests.helpers.configs import compose_ppo
from tests.helpers.http_server import serving
from tests.helpers.rl_run import compose_run, fake_trainer, metrics_rows
from tests.reward.test_managers import TOKENIZER, batch
from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker, reward_manager
from verl.experimental.reward_loop.reward_manager import DAPORewardManager, NaiveRewardManager, get_reward_manager_cls
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.reward import managers
from verl.reward.loading import load_reward_manager
from verl.trainer.run.timing import StepFailed


def config(**reward_model):
    data = {"max_response_length": 4, "reward_fn_key": "data_source"}
    return OmegaConf.create({"data": data, "reward_model": reward_model})


def words(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str.split()) + extra_info["index"]


async def later(solution_str, **kwargs):
    await asyncio.sleep(0)
    return {"score": 0.5 * len(solution_str.split()), "words": solution_str}


def single(manager, data):
    return asyncio.run(manager.run_single(data))


def test_functions_of_both_kinds_score_a_sample():
    assert single(NaiveRewardManager(config(), TOKENIZER, words), batch()[:1]) == {
        "reward_score": 12.0, "reward_extra_info": {"acc": 12.0}
    }  # fmt: skip
    result = single(NaiveRewardManager(config(), TOKENIZER, later), batch()[1:])
    assert result == {"reward_score": 0.5, "reward_extra_info": {"score": 0.5, "words": "7"}}


def test_a_router_reaches_the_function():
    def ask(reward_router_address, reward_model_tokenizer, **kwargs):
        return {"score": 1.0, "asked": reward_router_address, "tokenizer": reward_model_tokenizer}

    manager = NaiveRewardManager(config(), TOKENIZER, ask, "127.0.0.1:80", "theirs")
    extras = single(manager, batch()[:1])["reward_extra_info"]
    assert extras == {"score": 1.0, "asked": "127.0.0.1:80", "tokenizer": "theirs"}


def test_overlong_answers_lose_points():
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    manager = DAPORewardManager(config(overlong_buffer=buffer), TOKENIZER, lambda **_: 1.0)
    results = [single(manager, batch(["1", "1 2", "1 2 3", "1 2 3 4"])[i : i + 1]) for i in range(4)]
    assert [result["reward_score"] for result in results] == [1.0, 1.0, 0.75, 0.5]  # -0.5 * (length - 2) / 2
    assert results[3]["reward_extra_info"] == {"score": 0.5, "acc": 1.0, "overlong_reward": -0.5, "overlong": True}
    with_score = DAPORewardManager(config(overlong_buffer=buffer), TOKENIZER, lambda **_: {"score": 1.0})
    assert with_score(batch(["1", "1 2 3 4"])).sum(1).tolist() == [1.0, 0.5]


def test_both_registries_of_verl_are_one():
    @reward_manager.register("of_samples")
    class OfSamples(RewardManagerBase):
        def __init__(self, config, tokenizer, compute_score):
            super().__init__(config, tokenizer)

        async def run_single(self, data):
            return {"reward_score": 2.0, "reward_extra_info": {}}

    @managers.register("of_batches")
    class OfBatches(managers.AbstractRewardManager):
        def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source"):
            pass

        def __call__(self, data, return_dict=False):
            return torch.ones_like(data.batch["responses"])

    assert managers.get_reward_manager_cls("of_samples") is OfSamples is get_reward_manager_cls("of_samples")
    assert managers.get_reward_manager_cls("of_batches") is OfBatches
    made = load_reward_manager(compose_ppo("reward_manager.name=of_samples"), TOKENIZER, 0)
    assert type(made) is OfSamples and made(batch()).sum(1).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="OfBatches scores whole batches; the reward loop needs a subclass of Reward"):
        get_reward_manager_cls("of_batches")
    assert managers.get_reward_manager_cls("naive") is managers.NaiveRewardManager
    assert issubclass(get_reward_manager_cls("naive"), managers.NaiveRewardManager)
    assert get_reward_manager_cls("naive") is NaiveRewardManager and issubclass(NaiveRewardManager, RewardManagerBase)
    assert NaiveRewardManager.__name__ == "NaiveRewardManager"


def test_limits_come_from_the_config():
    limits = config(max_concurrent=3, max_rpm=120)
    for cls in (reward_manager.RateLimitedRewardManager, get_reward_manager_cls("rate_limited")):
        manager = cls(limits, TOKENIZER, words)
        assert single(manager, batch()[:1])["reward_score"] == 12.0
        assert manager._max_concurrent == 3 and manager._rpm_limiter.rate_limit == 2.0 and manager._tpm_limiter is None


@pytest.mark.process
def test_a_served_reward_model_is_asked_for_the_chat(tmp_path, tiny_llama):
    def count_words(request):
        return 200 if request.path == "/classify" else 404, {"data": [{"probs": [len(request.body["input"].split())]}]}

    settings = compose_run(tmp_path, tiny_llama, reward_model__enable="true", reward_model__model__path=tiny_llama)
    settings.custom_reward_function.path = None
    asked = object_columns(raw_prompt=[[{"role": "user", "content": "a b"}]] * 2)
    with serving(count_words) as (url, _):
        worker = RewardLoopWorker(settings, url.removeprefix("http://"))
        results = asyncio.run(worker.compute_score_batch(batch(**asked)))
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": ""}]
    empty = len(worker.manager.reward_model_tokenizer.apply_chat_template(chat, tokenize=False).split())
    assert [result["reward_score"] for result in results] == [empty + 2, empty + 1]
    with pytest.raises(ValueError, match="needs the address of a server"):
        RewardLoopWorker(settings)


@pytest.mark.process
@pytest.mark.slow
def test_a_batch_is_scored_by_the_configured_manager(ray_cluster, tmp_path, tiny_llama):
    settings = compose_run(tmp_path, tiny_llama, reward_model__num_workers=2)
    scored = RewardLoopManager(settings).compute_rm_score(batch(["1 a", "7", "a a a 4"]))
    # the reward of tests.helpers.rl_run: the share of numbers among the words
    assert scored.batch["rm_scores"].tolist() == [[0, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0.25]]
    assert scored.non_tensor_batch["words"].tolist() == [2, 1, 4]
    assert scored.meta_info["reward_extra_keys"] == ["score", "words"]
    remote = compose_run(tmp_path, tiny_llama, reward_model__num_workers=2, reward_manager__name="remote")
    again = RewardLoopManager(remote).compute_rm_score(batch(["1 a"]))
    assert again.batch["rm_scores"].tolist() == [[0, 0.5, 0, 0]]


@pytest.mark.process
def test_a_trainer_scores_by_managers_of_single_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(managers.RateLimitedRewardManager, "_max_concurrent", None)
    rows = {}
    for name in ("naive", "rate_limited"):
        settings = {"reward_manager__name": name, "reward_model__max_concurrent": 8, "trainer__total_training_steps": 2}
        fake_trainer(compose_run(tmp_path / name, "unused", **settings)).fit()
        rows[name] = metrics_rows(tmp_path / name)
    assert rows["naive"] == rows["rate_limited"]
    own = tmp_path / "mine.py"
    own.write_text(
        "from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase\n"
        "class Mine(RewardManagerBase):\n"
        "    def __init__(self, config, tokenizer, compute_score=None):\n"
        "        super().__init__(config, tokenizer)\n"
        "    async def run_single(self, data):\n"
        "        return {'reward_score': float(len(data)), 'reward_extra_info': {}}\n"
    )
    settings = {"reward_model__reward_loop_source": "importlib", "trainer__total_training_steps": 1}
    config = compose_run(tmp_path / "mine", "unused", **settings)
    with pytest.raises(ValueError, match="needs reward_model.reward_loop_module_path"):
        fake_trainer(config)
    config.reward_model.reward_loop_module_path, config.reward_model.reward_loop_class_name = str(own), "Mine"
    fake_trainer(config).fit()
    assert metrics_rows(tmp_path / "mine")[0]["critic/score/mean"] == 1.0
    own.write_text(own.read_text().replace("float(len(data))", "1 / 0"))
    with pytest.raises(StepFailed, match="ZeroDivisionError"):
        config.trainer.default_local_dir = str(tmp_path / "broken")
        config.reward_model.reward_loop_module_path = str(own.rename(tmp_path / "mine2.py"))
        fake_trainer(config).fit()
