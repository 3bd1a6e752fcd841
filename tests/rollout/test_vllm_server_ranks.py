"""The server of one vLLM engine over two ranks (tensor parallel)."""

import asyncio

import pytest
import torch

from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]


def greedy(rollout, prompts, rid):
    """The tokens that the server answers to prompts that are asked together."""
    from verl.rollout.replica import ServerClient

    async def ask():
        async with ServerClient(rollout.server_handle) as client:
            sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
            asked = (client.generate(f"{rid}-{n}", ids, sampling, True) for n, ids in enumerate(prompts))
            return [answer.token_ids for answer in await asyncio.gather(*asked)]

    return asyncio.run(ask())


def first_refuses(rollout):
    """The error of a batch while a request runs, and what the request has made when it is aborted."""
    from verl.rollout.replica import ServerClient

    async def ask():
        async with ServerClient(rollout.server_handle) as client:
            sampling = {"temperature": 0.0, "max_tokens": 15, "ignore_eos": True}
            running = asyncio.create_task(client.generate("long", [5, 6], sampling, False))
            while not rollout.server.requests:
                await asyncio.sleep(0.005)
            await client.post("pause_generation", {"mode": "in_place"})
            with pytest.raises(RuntimeError, match="1 requests run") as refused:
                await asyncio.to_thread(rollout.read_weights, rollout.model_config.local_path)
            await client.post("abort_request", {"abort_all": True})
            await client.post("continue_generation", {})
            return str(refused.value), (await running).stop_reason

    return asyncio.run(ask())


def on_ranks(rank, world_size, path):
    import torch.distributed as dist

    from tests.helpers.engines import make_actor, make_engine, rl_batch
    from tests.rollout.test_vllm_rollout import prompts
    from verl.rollout import get_rollout_class
    from verl.workers.config import RolloutConfig

    engine = make_engine(path, lr=3e-2)
    config = RolloutConfig(
        name="vllm", mode="async", prompt_length=16, response_length=16, dtype="float32", max_num_seqs=4,
        max_num_batched_tokens=64, calculate_log_probs=True, max_model_len=32, tensor_model_parallel_size=2,
    )  # fmt: skip
    rollout = get_rollout_class("vllm", "async")(config, engine.model_config, engine.mesh)
    asked = [[3 + k, 4, 5 + 2 * k][: 1 + k % 3] for k in range(7)]  # more than the engine runs at once
    served, wanted = [], []
    for seed in (1, 2):
        rollout.resume(["weights"])
        rollout.update_weights(engine.get_per_tensor_param())
        rollout.resume(["kv_cache"])
        answers = greedy(rollout, asked, f"step{seed}") if rank == 0 else None
        dist.barrier()
        batch = rollout.generate_sequences(prompts(seed=rank, n=1))
        served.append(answers)
        with torch.no_grad(), engine.eval_mode(), engine.unsharded():
            wanted.append([continued(engine.module, ids) for ids in asked])
        rollout.release()
        make_actor(engine, mini=4).update_policy(rl_batch(rows=8, seed=seed)[rank * 4 : rank * 4 + 4])
    rollout.resume(["weights", "kv_cache"])
    refusal_of_first = first_refuses(rollout) if rank == 0 else refusal(rollout)
    dist.barrier()
    again = greedy(rollout, asked, "again") if rank == 0 else None
    dist.barrier()
    has_server = rollout.server_handle is not None
    rollout.close()
    return served, wanted, refusal_of_first, again, has_server, len(batch)


def refusal(rollout):
    with pytest.raises(RuntimeError, match="1 requests run") as refused:
        rollout.read_weights(rollout.model_config.local_path)
    return str(refused.value), None


def continued(module, ids):
    """Six tokens by plain forward passes."""
    ids = list(ids)
    begun = len(ids)
    for _ in range(6):
        ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[begun:]


def test_the_first_rank_serves_the_engine_of_both(tmp_path):
    (served, wanted, refusal_of_first, again, leads, rows), (_, _, refused, _, follows, _) = run_ranks(
        on_ranks, 2, save_tiny_llama(tmp_path / "wide", vocab_size=96)
    )
    assert leads and not follows and rows > 0
    assert served == wanted and served[0] != served[1]
    assert refusal_of_first[0] == refused[0] and refusal_of_first[1] == "aborted"
    assert again == served[1]  # the weights of the last update are still those of the engine
