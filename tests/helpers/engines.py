"""Small engines, batches and actors for tests of one rank or several."""

import asyncio
import weakref
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout import get_rollout_class
from verl.rollout.replica import ServerClient
from verl.training.actor import DataParallelPPOActor
from verl.training.engine import FSDPEngine
from verl.training.parallel import sharding
from verl.training.policy import get_policy
from verl.workers.config import CheckpointConfig, FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig


def make_engine(
    path, *, optim=True, lr=1e-2, contents=("model", "optimizer", "extra"), async_save=False, engine=None, **model
):
    """An initialised CPU engine in float32 over a model directory; keywords go into HFModelConfig.

    `optim`: False for none, True for AdamW at `lr`, or the settings of another optimizer.
    """
    settings = {"lr": lr, "clip_grad": 1.0, **(optim if isinstance(optim, dict) else {})}
    built = FSDPEngine(
        HFModelConfig(path=path, load_tokenizer=False, **{"enable_gradient_checkpointing": False, **model}),
        FSDPEngineConfig(**{"dtype": "float32", **(engine or {})}),
        FSDPOptimizerConfig(**settings) if optim else None,
        CheckpointConfig(save_contents=list(contents), load_contents=list(contents), async_save=async_save),
        device="cpu",
    )
    built.initialize()
    return built


def count_gathered_copies(monkeypatch) -> list[int]:
    """How many of the tensors gathered before are still in memory, an entry for each tensor that is gathered."""
    copies, kept, gather = [], [], sharding._gather_bucket

    def with_copies(bucket, check_finite):
        """What several ranks would gather: tensors that share no memory with the model's."""
        kept.append(sum(copy() is not None for copy in copies))
        for name, tensor in gather(bucket, check_finite):
            copy = tensor.clone()
            copies.append(weakref.ref(copy))
            yield name, copy

    monkeypatch.setattr(sharding, "_gather_bucket", with_copies)
    return kept


def make_actor(engine, *, mini=8, micro=8, **config):
    settings = dict(
        ppo_mini_batch_size=mini, ppo_micro_batch_size_per_gpu=micro, rollout_n=1, grad_clip=1.0, clip_ratio=0.2
    )
    return DataParallelPPOActor(FSDPActorConfig(**{**settings, **config}), engine, get_policy("causal_lm"))


def serve_weights(engine, version=0, **settings):
    """A vLLM rollout whose HTTP server answers with the engine's weights, as those of `version`."""
    config = RolloutConfig(**{
        "name": "vllm", "mode": "async", "dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 400,
        "calculate_log_probs": True, **settings,
    })  # fmt: skip
    rollout = get_rollout_class("vllm", "async")(config, engine.model_config, engine.mesh)
    rollout.weights_version = version
    rollout.resume(["weights"])
    rollout.update_weights(engine.get_per_tensor_param())
    rollout.resume(["kv_cache"])
    return rollout


def ask(rollout, function):
    """What `function(client)`, a coroutine function, gets from the HTTP server of a rollout."""

    async def session():
        async with ServerClient(rollout.server_handle) as client:
            return await function(client)

    return asyncio.run(session())


def rl_batch(rows=8, prompt=4, response=6, vocab=64, seed=0) -> DataProto:
    """Rows of unlike lengths, advantages, masks with holes, old log-probs near the truth of a fresh model."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocab, (rows, prompt + response), generator=g)
    mask = torch.ones_like(ids)
    for i in range(rows):
        mask[i, : i % prompt] = 0
        mask[i, prompt + response - (i * 2) % response :] = 0
    response_mask = mask[:, prompt:].clone()
    response_mask[::3, 1] = 0
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": (ids * mask)[:, prompt:],
            "response_mask": response_mask,
            "advantages": torch.randn(rows, response, generator=g),
            "old_log_probs": -4.2 + 0.1 * torch.randn(rows, response, generator=g),
            "ref_log_prob": -4.1 + 0.1 * torch.randn(rows, response, generator=g),
        }
    )
    batch.meta_info["temperature"] = 0.8
    return batch


def left_padded(lengths, width: int, seed: int = 0, **meta) -> DataProto:
    """Prompts of random tokens, of these lengths, for a rollout: [len(lengths), width]."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width)[None] >= width - torch.tensor([*lengths])[:, None]).long()
    ids = torch.randint(5, 60, mask.shape, generator=generator) * mask
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        meta_info={"eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "global_steps": 1, **meta},
    )


def weights_of(engine) -> dict:
    """Whole weights as float32 numpy arrays by Hugging Face name."""
    return {name: t.float().numpy().copy() for name, t in engine.get_per_tensor_param()}


def leave_group():
    if dist.is_initialized():
        dist.destroy_process_group()


class FakeEngine:
    """An engine that is only its module."""

    def __init__(self, module):
        self.module = module.eval()
        self.device = module.device

    @contextmanager
    def eval_mode(self):
        yield self

    def autocast(self):
        return nullcontext()

    unsharded = autocast
