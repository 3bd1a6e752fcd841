"""The registry of columns holds what real batches contain: dtype, shape, and the step of the loop that adds each."""

import functools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.agents.agent_loop.parts import listed, prompts_of, server_group
from tests.agents.agent_loop.scripted import ScriptedEngine
from tests.helpers.chat_templates import FORMATS, byte_tokenizer
from tests.helpers.columns import object_columns
from tests.helpers.configs import compose_ppo
from tests.helpers.models import make_tokenizer, save_tiny_llama
from tests.helpers.rl_run import compose_run, fake_run, keep_batches, overrides
from verl.agents.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.agents.agent_loop.manager import AgentLoopManager, conversations_of
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.protocol.columns import ARRAYS, TENSORS, WRITERS
from verl.reward.managers import PrimeRewardManager
from verl.rollout.sampling import GenerationRequest
from verl.trainer.fully_async.phase import SeparateRolloutPhase
from verl.trainer.fully_async.samples import Group, Sample
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.run.ray_session import run_here

ROOT = Path(__file__).resolve().parents[2]
FORMAT = FORMATS["hermes"]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 5}}</tool_call>'
LENGTHS = {"P": 12, "R": 6, "T": 18}  # of `compose_run`
#: On the ranks, within a step, or given by the test: no step of the trainer ends with such a new column.
BETWEEN_STEPS = {
    ("tensor", "entropys"), ("tensor", "sampling_mask"), ("tensor", "chosen"), ("array", "weights_versions"),
    ("array", "reward_score"), ("array", "agent_name"),
}  # fmt: skip


@register("scored")
class ScoredLoop(AgentLoopBase):
    """Answers one token, and scores the answer itself."""

    async def run(self, sampling_params, **kwargs):
        return AgentLoopOutput(prompt_ids=[5], response_ids=[6], response_mask=[1], reward_score=0.5, num_turns=2)


def columns_of(batch):
    """{(kind, name): column}."""
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    arrays = {("array", name): column for name, column in batch.non_tensor_batch.items()}
    return {("tensor", name): column for name, column in tensors.items()} | arrays


class Seen:
    """What every DataProto of this process contains, and which step of the trainer added a column first."""

    def __init__(self, patch):
        self.made, self.forms, self.steps = [], defaultdict(set), defaultdict(set)
        check = DataProto.__post_init__

        def note(batch):
            check(batch)
            self.made.append(batch)
            self.note(batch)

        patch.setattr(DataProto, "__post_init__", note)
        for name in {step for step, _ in WRITERS.values()}:
            patch.setattr(RayPPOTrainer, name, self.watched(name, getattr(RayPPOTrainer, name)))

    def note(self, batch):
        for key, column in columns_of(batch).items():
            self.forms[key].add((str(column.dtype).removeprefix("torch."), column.ndim))

    def added(self, step, before, batch):
        for key in columns_of(batch).keys() - before:
            self.steps[key].add(step)

    def watched(self, step, method):
        @functools.wraps(method)
        def noting(trainer, *args):
            before = set(columns_of(args[0])) if args else set()
            result = method(trainer, *args)
            before |= set() if args else set(self.steps)  # by the steps that this one called
            self.added(step, before, result[0] if isinstance(result, tuple) else args[0])
            return result

        return noting

    def end(self):
        for batch in self.made:  # columns that were added later
            self.note(batch)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Of a step on real ranks, one with stand-ins, agent loops, and a batch of asynchronous training."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Seen(patch)
        seen.batch = step_on_ranks(patch, tmp_path_factory.mktemp("ranks"))
        fake_run(
            tmp_path_factory.mktemp("fake"), algorithm__adv_estimator="remax", trainer__total_training_steps=1,
            trainer__save_freq=0, reward_model__launch_reward_fn_async="true",
        )  # fmt: skip
        for step, given, batch in (graded(seen.batch), *conversations(tmp_path_factory), asynchronous_batch()):
            seen.added(step, set(columns_of(given)), batch)
        seen.end()
    return seen


def step_on_ranks(patch, folder):
    batches, model = keep_batches(patch), save_tiny_llama(folder / "model")
    config = compose_run(
        folder, model, trainer__local="true", trainer__total_training_steps=1, reward_model__num_workers=0,
        trainer__save_freq=0, actor_rollout_ref__actor__use_kl_loss="true", algorithm__adv_estimator="gae",
        actor_rollout_ref__rollout__calculate_log_probs="true", critic__model__path=model,
        critic__ppo_micro_batch_size_per_gpu=8, actor_rollout_ref__rollout__n=2, data__return_full_prompt="true",
        actor_rollout_ref__rollout__top_k=5, actor_rollout_ref__actor__calculate_sum_pi_squared="true",
        actor_rollout_ref__actor__policy_loss__loss_mode="clip_cov", algorithm__rollout_correction__rollout_is="token",
    )  # fmt: skip
    assert run_here(TaskRunner(), config) == 0
    return batches[0]


def graded(batch):
    """By the reward manager that keeps its scores in the batch."""
    given, result = batch.select(), batch.select()
    manager = PrimeRewardManager(make_tokenizer(), 0, None)
    manager.results = lambda data, rows: [1.0] * len(rows)
    manager.verify(result)
    return "_score", given, result


def conversations(tmp_path_factory):
    """With a tool, an interaction and rows of single turns; of a loop that scores its answers."""
    folder, tokenizer = tmp_path_factory.mktemp("loops"), byte_tokenizer(FORMAT)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    multi_turn = {"row_per_turn": True, "format": "hermes", "journal_tool_calls": False}
    multi_turn["tool_config_path"] = listed(folder, "tools", "AddTool")
    multi_turn["interaction_config_path"] = listed(folder, "interaction", "PatientInteraction")
    config = compose_ppo(
        *overrides(
            folder, str(folder / "model"), data__max_prompt_length=200, data__max_response_length=100,
            actor_rollout_ref__rollout__name="vllm", actor_rollout_ref__rollout__mode="async", trainer__local="true",
            actor_rollout_ref__rollout__calculate_log_probs="true",
        )
    )  # fmt: skip
    OmegaConf.update(config, "actor_rollout_ref.rollout.multi_turn", multi_turn)
    manager = AgentLoopManager(config, server_group())
    end = tokenizer.convert_tokens_to_ids(FORMAT.stop)

    def answer(request, prompt_ids, sampling_params):
        text = "yes" if "7" in tokenizer.decode(prompt_ids) else CALL
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]

    (worker,) = manager.agent_loop_workers
    worker.server_manager = ScriptedEngine(worker.rollout_config, answer)
    for agent in ("tool_agent", "scored"):
        columns = object_columns(
            raw_prompt=[[{"role": "user", "content": "add"}]], agent_name=[agent], tools_kwargs=[{}],
            interaction_kwargs=[{"name": "patient", "extra": {}}],
        )  # fmt: skip
        prompts = prompts_of(columns, width=8, n=2, eos_token_id=end)
        request = GenerationRequest.from_batch(prompts, manager.rollout_config)
        yield "_generate", prompts, conversations_of(prompts, request, manager.rollout_config)
        yield "_generate", prompts, manager.generate_sequences(prompts)
    manager.close()


def asynchronous_batch():
    phase = object.__new__(SeparateRolloutPhase)
    phase.rollout_config = RolloutConfig(name="vllm", prompt_length=4, response_length=6, n=1, stop_token_ids=[9])
    phase.tokenizer = SimpleNamespace(pad_token_id=0)
    fields = {"response_ids": [8, 9], "response_mask": [1, 1], "extra_fields": {"end_reason": "stop"}}
    output = AgentLoopOutput(prompt_ids=[7], num_turns=2, **fields)
    sample = Sample("0/0", seed=0, state="queued", output=output, spans=[(0, 1), (1, 1)], result=1.0)
    prompt = DataProto(None, object_columns(uid=["0"]), {})
    return "_generate", prompt, phase.batch_of([Group(0, prompt, {}, 1, [sample])], 1)[0]


def registered():
    """{(kind, name): Column}."""
    arrays = {("array", name): column for name, column in ARRAYS.items()}
    return {("tensor", name): column for name, column in TENSORS.items()} | arrays


def test_every_column_of_a_batch_is_registered_with_its_dtype_and_rank(seen):
    forms = {key: {(column.dtype, column.shape.count(",") + 1)} for key, column in registered().items()}
    assert dict(seen.forms) == forms  # the registry has no column that does not exist


def test_columns_of_a_step_have_the_shapes_of_the_registry(seen):
    sizes = {**LENGTHS, "B": len(seen.batch)}
    for name, tensor in seen.batch.batch.items():
        shape = [sizes[letter] for letter in TENSORS[name].shape.strip("[]").split(", ")]
        assert list(tensor.shape) == shape, name


def test_the_writers_add_their_columns_in_the_steps_of_the_registry(seen):
    registry = registered()
    for key, steps in seen.steps.items():
        assert steps <= {WRITERS[writer][0] for writer in registry[key].writer.split(", ")}, key
    assert registry.keys() - seen.steps.keys() == BETWEEN_STEPS
    assert {writer for column in registry.values() for writer in column.writer.split(", ")} == set(WRITERS)
    assert all((ROOT / place).exists() for _, places in WRITERS.values() for place in places.split(", "))
