"""Shared fixtures: one Ray cluster a session, tiny models made here, one thread a process."""

import asyncio
import inspect
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # Ray kills no worker because others need memory

import pytest
from hypothesis import settings

from tests.helpers.models import save_tiny_llama

# A busy machine is slow, not wrong; derandomized, so that a failure is there again in the next run.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def ray_cluster():
    """A local Ray cluster of four logical CPUs, shared by every test that needs Ray."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def environment_of_each_test():
    """Undo what a test leaves in os.environ: entries set variables that the next test of the process would read."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(autouse=True)
def no_numba_to_be_searched(monkeypatch):
    """A test may have loaded numba: a new engine of vLLM looks for kernels in all modules, and fails on this one."""
    monkeypatch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)


@pytest.fixture(scope="module", autouse=True)
def no_bundles_kept_in_ray():
    """A file that leaves ranks' places reserved would starve those behind it: named here, and given back."""
    yield
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    deadline = time.monotonic() + 120  # Ray takes places back in its own time
    while kept := [g["name"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]:
        if time.monotonic() > deadline:
            for name in kept:
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
            pytest.fail(f"placement groups were not released: {kept}")
        time.sleep(0.2)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_kept():
    """Engines stay in torch's process group, which is made once: the next file makes its own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def confined(request) -> None:
    """Skip a test of confined programs where the kernel forbids that, and the product refuses to run any."""
    from tests.helpers.sandbox import refused, why_not

    if refused(request):
        pytest.skip(why_not())


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    """Directory of a 2-layer Llama (64 words, head dimension 32) with its word-level tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory) -> str:
    """The same with tied embeddings, as most small models have."""
    return save_tiny_llama(tmp_path_factory.mktemp("tied_llama"), tied=True)


@pytest.fixture(params=["tiny_llama", "tied_llama"])
def llama(request) -> str:
    """Either of the two, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show, with a test that failed, how Ray's workers crashed: their logs are not written to the driver's output."""
    report = yield
    ray = sys.modules.get("ray")
    if report.failed and ray is not None and ray.is_initialized():
        logs = Path(ray._private.worker._global_node.get_logs_dir_path())
        for log in logs.glob("worker-*.err"):
            text = log.read_text(errors="replace") if log.stat().st_mtime >= call.start else ""
            crash = re.search("Fatal Python error|terminate called|[*]{3} SIG", text)
            if crash:
                report.sections.append((f"crash in {log.name}", text[max(0, crash.start() - 500) : crash.end() + 4000]))
    return report


# Folders and files whose tests all belong to one group of the Makefile.
GROUPS = {
    "benchmarks": "benchmark", "examples": "demo",
    "spd/test_frontier.py": "demo", "spd/test_testbed.py": "demo", "scripts/test_audit.py": "audit",
    "scripts/test_departures.py": "audit", "reward/test_served.py": "long",
    "agents/agent_loop/test_async_run.py": "long", "spd/test_submit.py": "long",
    "spd/vllm_plugin/test_server.py": "long", "dllm_reasoning/test_ranks.py": "long",
    "trainer/ppo/test_algorithms_learn.py": "long", "trainer/ppo/test_ray_trainer_ranks.py": "long",
    "trainer/fully_async/test_runs.py": "long", "trainer/fully_async/test_kills.py": "long",
    "compat/test_project09.py": "long", "trainer/sft/test_sft_run.py": "long", "trainer/test_offline.py": "long",
    "spd/test_spd_run.py": "long",
    "spd/test_prepare_blocks.py": "long", "spd/test_real_shapes.py": "long", "spd/test_spd_rollout.py": "long",
    "rollout/test_vllm_ranks.py": "long", "training/test_tensor_parallel.py": "long",
    "training/test_sequence_parallel.py": "long", "planning/test_memory_trace.py": "long",
    "rollout/test_replica.py": "long", "agents/agent_loop/test_ray_workers.py": "long",
    "reward/test_reward_loop.py": "long", "dllm_reasoning/test_vllm_drafter.py": "long",
    "compat/test_aliases.py": "long", "compat/test_commands.py": "long", "models/test_families.py": "long",
    "recipe/test_dapo.py": "long", "reward/test_escapes.py": "long", "spd/test_eval.py": "long",
    "spd/test_server.py": "long", "test_documented_commands.py": "long", "trainer/test_published_commands.py": "long",
    "rollout/test_vllm_speculative.py": "long",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of GROUPS; sort files with slow tests first, so that two processes end at about the same time."""
    slow = {item.path: 0 for item in items}
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        for place, group in GROUPS.items():
            if path == place or path.startswith(f"{place}/"):
                item.add_marker(group)
        slow[item.path] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: -slow[item.path])
