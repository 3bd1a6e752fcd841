"""Roles as a rank builds them, in this process: reference by adapters, weights versions, reward model.

Not covered here: Ray, several ranks (tests/trainer/ppo/test_ray_trainer_ranks.py).
"""

import dataclasses
import os

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoModelForTokenClassification, LlamaForCausalLM

from tests.helpers.engines import leave_group, left_padded
from tests.helpers.models import CHAT_TEMPLATE, WORDS, make_tokenizer
from tests.helpers.ranks import run_ranks
from tests.helpers.rl_run import compose_run
from verl.protocol import DataProto
from verl.roles.ranks import per_rank_sizes
from verl.rollout.base import BaseRollout
from verl.workers.config import FSDPActorConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker, RewardModelWorker

P, N = 12, 4


@pytest.fixture(scope="module", autouse=True)
def lone_rank():
    before = dict(os.environ)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()
    os.environ.clear()
    os.environ.update(before)


def run_config(folder, model, **more):
    return OmegaConf.create(OmegaConf.to_container(compose_run(folder, model, **more), resolve=True))


@pytest.fixture(scope="module")
def worker(tiny_llama, tmp_path_factory):
    """Actor, hf rollout and reference of a LoRA run on one rank."""
    folder = tmp_path_factory.mktemp("worker")
    config = run_config(folder, tiny_llama, actor_rollout_ref__model__lora_rank=4,
                        actor_rollout_ref__actor__optim__lr="3e-2",
                        actor_rollout_ref__actor__optim__total_training_steps=10)  # fmt: skip
    made = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout_ref", device_name="cpu")
    made.init_model()
    return made


def prompts(step):
    return left_padded(range(P, P - 8, -1), P, step, n=N, temperature=1.0, global_steps=step)


def update(worker, samples, step):
    batch = DataProto(samples.batch.clone(), {}, {"temperature": 1.0, "global_steps": step})
    generator = torch.Generator().manual_seed(step)
    batch.batch["advantages"] = torch.randn(batch.batch["responses"].shape, generator=generator)
    return worker.update_actor(batch)


def test_the_reference_of_a_lora_run_is_its_base_model(worker, tiny_llama):
    samples = worker.generate_sequences(prompts(1))
    updated = update(worker, samples, 1).meta_info["metrics"]
    assert psutil.Process().memory_info().rss / 2**30 <= updated["perf/max_memory_resident_gb"] + 0.1
    samples.meta_info = {"temperature": 0.7}
    computed = worker.compute_ref_log_prob(samples).batch["ref_log_prob"]
    batch, base = samples.batch, LlamaForCausalLM.from_pretrained(tiny_llama).eval()
    with torch.no_grad():
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        log_p = (base(**inputs).logits[:, P - 1 : -1] / 0.7).log_softmax(-1)
    mask = batch["response_mask"].bool()
    expected = log_p.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(computed[mask], expected[mask], rtol=1e-4, atol=1e-5)
    samples.meta_info = {"temperature": 0.7}
    trained = worker.compute_log_prob(samples).batch["old_log_probs"]
    assert (trained - computed)[mask].abs().max() > 1e-3  # the adapters are on again, and have learned


def test_samples_carry_their_weights_version_and_an_outdated_rollout_is_refused(worker, tmp_path):
    def refused(held, actual):
        message = f"holds weights version {held}, the actor {actual}: it was not given the weights .*Call trainer_mode"
        with pytest.raises(RuntimeError, match=message):
            worker.generate_sequences(prompts(2))

    before = worker.weights_version
    samples = worker.generate_sequences(prompts(2))
    assert samples.non_tensor_batch["weights_version"].tolist() == [before] * 8 * N
    worker.rollout_mode()
    update(worker, samples, 5)
    refused(before, 5)  # awake while the actor was updated
    worker.trainer_mode()
    assert set(worker.generate_sequences(prompts(3)).non_tensor_batch["weights_version"]) == {5}
    folder = tmp_path / "global_step_5" / "actor"
    worker.save_checkpoint(str(folder), None, 5, None)
    update(worker, samples, 6)
    worker.rollout_mode()
    worker.load_checkpoint(str(folder))
    refused(None, 5)  # woken before the resume
    worker.trainer_mode()
    assert set(worker.generate_sequences(prompts(3)).non_tensor_batch["weights_version"]) == {5}


class RecordingRollout(BaseRollout):
    """Records what it is requested and where the actor's weights are then."""

    def __init__(self, moves, keeps_weights):
        self.moves, self.keeps_weights, self.events = moves, keeps_weights, []

    def update_weights(self, weights, **kwargs):
        self.events.append(("weights", len(list(weights)) > 0, self.moves[-1]))

    def generate_sequences(self, prompts):
        self.events.append(("generate", self.moves[-1]))
        rows = {key: prompts.batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        rows |= {"prompts": rows["input_ids"], "responses": rows["input_ids"]}
        return DataProto.from_dict(rows, non_tensors={"row": np.arange(len(prompts))})


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_weights_are_sent_once_per_version_and_are_offloaded_while_the_rollout_generates(
    worker, monkeypatch, keeps_weights
):
    moves, engine = ["cpu"], worker.engine  # the device that the engine moved its parameters to last
    monkeypatch.setattr(engine, "is_param_offload_enabled", True)
    monkeypatch.setattr(engine, "to", lambda device, **kw: moves.append("cpu" if device == "cpu" else "device"))
    monkeypatch.setattr(engine, "device_type", "accelerator")
    monkeypatch.setattr(worker, "rollout", RecordingRollout(moves, keeps_weights))
    monkeypatch.setattr(worker, "rollout_version", None)
    sent = []
    for version in (7, 7, 8):
        worker.weights_version = version
        sent.append(worker.rollout_mode())
        for _ in range(2):
            worker.generate_sequences(prompts(1))
        worker.trainer_mode()
    assert sent == ([True, False, True] if keeps_weights else [True, True, True])
    events = worker.rollout.events
    assert [e for e in events if e[0] == "weights"] == [("weights", True, "device")] * sum(sent)
    assert [e for e in events if e[0] == "generate"] == [("generate", "cpu")] * 6


def test_a_role_says_whether_its_log_probs_are_compiled(worker):
    engine = dataclasses.replace(worker.actor_config.fsdp_config, use_torch_compile=True)
    roles = (worker.actor_config, dataclasses.replace(worker.actor_config, use_torch_compile=True),
             dataclasses.replace(worker.actor_config, fsdp_config=engine))  # fmt: skip
    assert [worker._make_policy(role).compiled for role in roles] == [False, True, True]


def scores_of_rows(rank, world_size, section):
    """rm_scores of this rank's half of four rows, and the number of ranks that compute them together."""
    worker = RewardModelWorker(config=OmegaConf.create(section), device_name="cpu")
    worker.init_model()
    own = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    ids = torch.randint(5, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(4):
        mask[row, : row + 1] = mask[row, 12 - row :] = 0
    rows = {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 6:], "response_mask": mask[:, 6:]}  # fmt: skip
    scored = worker.compute_rm_score(DataProto.from_dict({name: rows[name][own] for name in rows}))
    return scored.batch["rm_scores"].numpy(), worker.engine.joint_size


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "packs"),
    [("ulysses_sequence_parallel_size", "false"), ("model__fsdp_config__tensor_parallel_size", "true"),
     ("model__fsdp_config__tensor_parallel_size", "false")],
)  # fmt: skip
def test_ranks_share_the_sequences_or_layers_of_a_reward_model(tiny_llama, tmp_path, shared, packs):
    sections = []
    for size in (1, 2):
        config = run_config(tmp_path, tiny_llama, reward_model__enable="true", reward_model__model__path=tiny_llama,
                            reward_model__model__use_remove_padding=packs, reward_model__micro_batch_size_per_gpu=2,
                            **{f"reward_model__{shared}": size})  # fmt: skip
        sections.append(OmegaConf.to_container(config.reward_model))
    expected, alone = scores_of_rows(0, 1, sections[0])
    scores, together = zip(*run_ranks(scores_of_rows, 2, sections[1]), strict=True)
    assert (expected != 0).sum() == 4 and alone == 1 and together == (2, 2)
    np.testing.assert_allclose(np.concatenate(scores), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packs", [False, True])
def test_a_reward_model_reads_the_answer_in_its_own_template_and_vocabulary(tiny_llama, tmp_path, packs):
    theirs = make_tokenizer(list(reversed(WORDS)))  # the same words under other ids
    theirs.chat_template = CHAT_TEMPLATE.replace("q :", "z").replace("a :", "y")
    theirs.save_pretrained(tmp_path / "rm")
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_pretrained(tiny_llama, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(tmp_path / "rm")
    config = run_config(tmp_path / "run", tiny_llama, reward_model__enable="true",
                        reward_model__model__path=tmp_path / "rm", reward_model__model__input_tokenizer=tiny_llama,
                        reward_model__model__use_remove_padding=packs,
                        reward_model__micro_batch_size_per_gpu=2, reward_model__max_length=12)  # fmt: skip
    worker = RewardModelWorker(config=config.reward_model, device_name="cpu")
    worker.init_model()
    assert worker.packs == packs

    ours, asked = make_tokenizer(), ["1 + 2 =", "3 * 4 = a b c d e f g h"]
    answers = [ours(text)["input_ids"] for text in ("3 .", "1 2 . a b")]
    texts = [ours.decode(ids) for ids in answers]
    responses = torch.zeros(2, 6, dtype=torch.int64)
    for row, ids in enumerate(answers):
        responses[row, : len(ids)] = torch.tensor(ids)
    mask = (responses != 0).long()
    data = DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask, "input_ids": torch.cat([responses, responses], 1),
                 "attention_mask": torch.cat([mask, mask], 1), "position_ids": torch.arange(12).repeat(2, 1)},
        non_tensors={"raw_prompt": np.array([[{"role": "user", "content": text}] for text in asked], dtype=object)},
    )  # fmt: skip
    scores = worker.compute_rm_score(data).batch["rm_scores"]
    for row in range(2):
        text = f"z {asked[row]} y {texts[row]} <eos>"
        ids = theirs(text)["input_ids"][-12:]  # the second conversation is too long: its beginning is cut
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, -1, 0].item()
        last = int(mask[row].sum()) - 1
        assert scores[row, last].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert (scores[row] != 0).sum() == 1


def actor(**keys):
    base = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": 3}
    return FSDPActorConfig(**(base | keys))


def test_mini_batch_counts_samples_of_one_rank():
    given = actor()
    assert per_rank_sizes(given, "actor", n=4, ranks=3).ppo_mini_batch_size == 8  # 6 prompts x 4 / 3
    assert given.ppo_mini_batch_size == 6


def test_old_global_micro_batch_is_shared_out():
    sizes = per_rank_sizes(actor(ppo_micro_batch_size=8, ppo_micro_batch_size_per_gpu=None), "actor", n=1, ranks=2)
    assert sizes.ppo_micro_batch_size_per_gpu == 4
    assert sizes.ppo_micro_batch_size is None


def test_mini_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="ppo_mini_batch_size=6 x rollout.n=1 gives 6 samples, which 4 ranks"):
        per_rank_sizes(actor(), "actor", n=1, ranks=4)
