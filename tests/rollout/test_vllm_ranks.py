"""One vLLM over two ranks (tensor parallel) in the processes of the actor that both of them train, and its server."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.protocol import DataProto

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def on_ranks(rank, world_size, path):
    """(mean distance of log-probs before and after an update, answers) of this rank's own prompts."""
    from tests.helpers.engines import make_actor, make_engine, rl_batch
    from tests.rollout.test_vllm_rollout import P, R, difference, prompts
    from verl.rollout import get_rollout_class
    from verl.training.policy import get_policy
    from verl.workers.config import RolloutConfig

    engine = make_engine(path, lr=3e-2)
    config = RolloutConfig(
        name="vllm", prompt_length=P, response_length=R, dtype="float32", max_num_seqs=16 if world_size == 2 else 3,
        max_num_batched_tokens=64, calculate_log_probs=True, max_model_len=32, tensor_model_parallel_size=2,
        prompt_queue=world_size > 2,
    )
    rollout = get_rollout_class("vllm", "sync")(config, engine.model_config, engine.mesh)
    distances = []
    for seed in (1, 2):
        rollout.update_weights(engine.get_per_tensor_param())
        output = rollout.generate_sequences(prompts(seed=10 * rank, n=2))
        if (queue := rollout.queue) is not None:
            rollout.queue = None
            assert rollout.generate_sequences(prompts(seed=10 * rank, n=2)).batch["responses"].equal(
                output.batch["responses"]
            )
            rollout.queue = queue
        with torch.no_grad(), engine.eval_mode():
            forward = get_policy("causal_lm").log_probs
            log_probs, _ = forward(engine.module, output.batch, temperature=1.0, with_entropy=False)
        distances.append(difference(output, log_probs))
        make_actor(engine, mini=4).update_policy(rl_batch(rows=4 * world_size, seed=seed)[rank * 4 : rank * 4 + 4])
    rollout.close()
    return distances, output.batch["prompts"].tolist(), output.batch["responses"].tolist()


@pytest.fixture
def segment_of_a_killed_run():
    """The shared-memory segment that a tensor-parallel run with vLLM's own name leaves after SIGKILL."""
    path = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")
    before = set(path.parent.glob("verl-*"))
    path.touch()
    yield
    path.unlink(missing_ok=True)
    new = set(path.parent.glob("verl-*")) - before
    assert not [file for file in new if file.is_file()]  # verl-cache is the folder of use_shm


@pytest.mark.usefixtures("segment_of_a_killed_run")
@pytest.mark.parametrize(("ranks", "tied"), [(2, True), (4, False)])
def test_engines_over_two_ranks_answer_each_ranks_prompts_with_the_trained_weights(tmp_path, ranks, tied):
    results = run_ranks(on_ranks, ranks, save_tiny_llama(tmp_path / "wide", vocab_size=96, tied=tied))
    assert all(distance < 1e-4 for distances, _, _ in results for distance in distances)
    for i, (_, asked, answers) in enumerate(results):
        assert len(answers) == 6
        assert all(asked != there and answers != answered for _, there, answered in results[:i])


def on_a_fast_and_a_slow_rank(rank, world_size, path):
    """Prompts that this rank's engine answered, the answers to this rank's prompts, and those without a queue."""
    from tests.helpers.engines import make_engine
    from tests.rollout.test_vllm_rollout import P, R, prompts
    from verl.rollout import get_rollout_class
    from verl.workers.config import RolloutConfig

    engine = make_engine(path)
    config = RolloutConfig(
        name="vllm", prompt_length=P, response_length=R, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64,
        calculate_log_probs=True, max_model_len=32, prompt_queue=True,
    )  # fmt: skip
    rollout = get_rollout_class("vllm", "sync")(config, engine.model_config, engine.mesh)
    rollout.update_weights(engine.get_per_tensor_param())
    batch = DataProto.concat([prompts(seed=10 * rank + k, n=1) for k in range(3)])
    batch.meta_info = prompts(seed=0, n=1).meta_info
    step, taken, take = rollout.llm.llm_engine.step, [], rollout.queue.take
    rollout.llm.llm_engine.step = lambda: (time.sleep(0.5 * rank), step())[1]
    rollout.queue.take = lambda most: (taken.append(take(most)), taken[-1])[1]
    queued = rollout.generate_sequences(batch)
    rollout.queue = None
    alone = rollout.generate_sequences(batch)
    rollout.close()
    return sum(map(len, taken)), [{k: v.tolist() for k, v in output.batch.items()} for output in (queued, alone)]


def test_an_engine_that_is_slow_takes_fewer_prompts_from_the_queue(tmp_path):
    results = run_ranks(on_a_fast_and_a_slow_rank, 2, save_tiny_llama(tmp_path / "wide", vocab_size=96))
    (fast, _), (slow, _) = results
    total = sum(len(queued["prompts"]) for _, (queued, _) in results)
    assert fast + slow == total and slow < total / 3 < fast
    for _, (queued, alone) in results:
        for name in alone:
            torch.testing.assert_close(torch.tensor(queued[name]), torch.tensor(alone[name]), rtol=0, atol=1e-5)


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


def serve_on_ranks(rank, world_size, path):
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
        serve_on_ranks, 2, save_tiny_llama(tmp_path / "wide", vocab_size=96)
    )
    assert leads and not follows and rows > 0
    assert served == wanted and served[0] != served[1]
    assert refusal_of_first[0] == refused[0] and refusal_of_first[1] == "aborted"
    assert again == served[1]  # the weights of the last update are still those of the engine
