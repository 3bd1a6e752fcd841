"""Small RL runs for tests: composed config, data files, a reward file, and workers that need no Ray."""

import functools
import json
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from tests.helpers.models import make_tokenizer
from verl.protocol import DataProto

REWARD = '''
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, broken=(), hanging=(), **kw):
    if extra_info["index"] in broken:
        raise ZeroDivisionError("the reward is broken")
    if extra_info["index"] in hanging:
        time.sleep(600)
    words = solution_str.split()
    return {"score": sum(w.isdigit() for w in words) / max(1, len(words)), "words": len(words)}
'''


#: A GRPO run on CPU ranks with the hf rollout.
RUN = """
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.logger=[] trainer.total_epochs=2 trainer.val_before_train=false
trainer.report=false data.train_batch_size=8 data.max_prompt_length=12 data.max_response_length=6 data.seed=1
data.dataloader_num_workers=0 algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=null
actor_rollout_ref.model.use_remove_padding=false actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.optim.lr=1e-3
"""


def write_prompts(directory: Path, prompts: int = 24) -> dict[str, str]:
    """train.jsonl, val.jsonl and reward.py in `directory`; their paths by name."""
    directory.mkdir(exist_ok=True)
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"{i % 20} + {3 * i % 20} ="}],
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": i},
        }
        for i in range(prompts)
    ]
    paths = {name: str(directory / name) for name in ("train.jsonl", "val.jsonl", "reward.py")}
    Path(paths["train.jsonl"]).write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path(paths["val.jsonl"]).write_text("".join(json.dumps(r) + "\n" for r in rows[:4]))
    Path(paths["reward.py"]).write_text(REWARD)
    return paths


def overrides(directory: Path, model: str, **more) -> list[str]:
    """Overrides of RUN in a folder; `more` has dots written as two underscores."""
    files = write_prompts(directory)
    places = {"trainer.default_local_dir": directory / "out", "actor_rollout_ref.model.path": model}
    places |= {"data.train_files": files["train.jsonl"], "data.val_files": files["val.jsonl"]}
    return merged(RUN, places | {"custom_reward_function.path": files["reward.py"]}, more)


def merged(run: str, places: dict, more: dict) -> list[str]:
    """KEY=VALUE for each key: of `run` as on a command line, of `places`, and of `more` with underscores for dots."""
    keys = dict(word.split("=", 1) for word in run.split()) | places
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def compose_run(directory: Path, model: str, tree: str = "verl.trainer.config/ppo_trainer", **more) -> DictConfig:
    """The config of such a run; `tree`: module and name of the config it starts from."""
    return OmegaConf.merge(_defaults(tree), OmegaConf.from_dotlist(overrides(directory, model, **more)))


@functools.cache
def _defaults(tree: str) -> DictConfig:
    module, _, name = tree.partition("/")
    with initialize_config_module(module, version_base=None):
        config = compose(name)
    OmegaConf.set_struct(config.custom_reward_function.reward_kwargs, False)  # takes any keyword of REWARD
    return config


def read_rows(file: Path) -> list[dict]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def metrics_rows(directory: Path, moment: tuple[str, ...] = ("timing", "perf/")) -> list[dict]:
    """metrics.jsonl without what differs between machines and moments: metrics that begin with one of `moment`."""
    rows = read_rows(directory / "out" / "metrics.jsonl")
    return [{"step": r["step"], **{k: v for k, v in r["data"].items() if not k.startswith(moment)}} for r in rows]


def keep_batches(monkeypatch) -> list[DataProto]:
    """The batches of the steps that trainers log from now on."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    batches, log = [], RayPPOTrainer._log

    def keep(trainer, batch, metrics):
        batches.append(batch)
        log(trainer, batch, metrics)

    monkeypatch.setattr(RayPPOTrainer, "_log", keep)
    return batches


class FakeGroup:
    """Stands in for a worker group: two ranks without processes, answers that depend on prompt and sample only."""

    world_size = 2
    lost_rows: tuple[int, ...] = ()  # of every generated batch
    nonfinite = False

    def __init__(self, **kwargs) -> None:
        self.calls: list[str] = []
        self.updates: list[DataProto] = []
        self.generated: list[list[str]] = []
        self.version = 0
        self.rollout_version, self.awake = None, False

    def init_model(self) -> None:
        self.calls.append("init_model")

    def rollout_mode(self) -> list[bool]:
        outdated, self.rollout_version, self.awake = self.rollout_version != self.version, self.version, True
        self.calls += ["send_weights"] * outdated
        return [outdated] * self.world_size

    def trainer_mode(self) -> None:
        self.awake = False

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.calls.append("generate")
        assert self.awake and self.rollout_version == self.version
        assert len(prompts) % self.world_size == 0
        n = prompts.meta_info["n"]
        self.generated.append(prompts.non_tensor_batch["uid"].tolist())
        batch = prompts.repeat(n, interleave=True).batch
        rows = len(batch["input_ids"])
        number = torch.arange(rows) % n  # [rows] the sample's number among those of its prompt
        responses = torch.where(torch.arange(6) < 2 + number[:, None], 5 + number[:, None], 30)
        mask = torch.ones_like(responses)
        tensors = {
            "prompts": batch["input_ids"],
            "responses": responses,
            "input_ids": torch.cat([batch["input_ids"], responses], 1),
            "attention_mask": torch.cat([batch["attention_mask"], mask], 1),
            "position_ids": torch.cat([batch["position_ids"], batch["position_ids"][:, -1:] + torch.arange(1, 7)], 1),
        }
        lost = np.zeros(rows, dtype=bool)
        lost[list(self.lost_rows)] = True
        columns = {"weights_version": np.full(rows, self.version), "__lost__": lost}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"metrics": {"fake/rows": [rows]}})

    def update_actor(self, data: DataProto) -> DataProto:
        self.calls.append("update")
        assert len(data) % self.world_size == 0
        self.updates.append(data)
        self.version = data.meta_info["global_steps"]
        return DataProto(meta_info={"metrics": {"actor/nonfinite_steps": [float(self.nonfinite)]}})

    def save_checkpoint(self, path, *args) -> None:
        Path(path).mkdir()
        (Path(path) / "version").write_text(str(self.version))

    def load_checkpoint(self, path, *args) -> None:
        self.calls.append("load")
        self.version = int((Path(path) / "version").read_text())


def group_with(base: type = FakeGroup, **attributes) -> type:
    """A class of groups that differs from `base` in these attributes."""
    return type("Group", (base,), attributes)


def fake_trainer(config: DictConfig, group_class: type = FakeGroup, trainer_class: type | None = None, roles=()):
    """A RayPPOTrainer whose only worker group is a FakeGroup; nothing of it needs Ray. `roles`: what it also does."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
    from verl.trainer.ppo.reward import load_reward_manager

    class NoPools(ResourcePoolManager):
        def create_resource_pool(self) -> None:
            self.resource_pool_dict = {"pool": None}

    tokenizer = make_tokenizer()
    trainer = (trainer_class or RayPPOTrainer)(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={Role.ActorRollout: FakeGroup, **dict(roles)},
        resource_pool_manager=NoPools({"pool": [2]}, {Role.ActorRollout: "pool"}),
        ray_worker_group_cls=group_class,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
    )
    trainer.init_workers()
    return trainer


def fake_run(directory: Path, group_class: type = FakeGroup, roles=(), stop_at: int | None = None, **more):
    """The trainer of such a run, which has ended: after its last step, or after the step `stop_at`."""
    trainer = fake_trainer(compose_run(directory, "unused", **more), group_class, roles=roles)
    if stop_at is not None:
        trainer.stop_requested = lambda: trainer.global_steps == stop_at
    trainer.fit()
    return trainer
