"""Programs that flood, hang, fork or die are counted as failed, and none of their processes is left."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.agents.gateway.parts import USER, run_program, worker_of
from tests.dllm_reasoning.models import captured_warnings
from tests.helpers.watched_runs import becomes
from verl.agents.agent_loop.rows import is_lost
from verl.agents.gateway.program import Limits, Program
from verl.trainer.run.prompt_stream import PromptLoader

pytestmark = pytest.mark.process

ASK = """
import json, os, sys, time, urllib.request
row = json.load(sys.stdin)

def post(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.load(reply)

def ask():
    return post("/chat/completions", messages=row["prompt"])["choices"][0]["message"]["content"]

with open("pids", "a") as file:
    print(os.getpid(), file=file)
"""
#: Programs that fail: their code, limits, and what the warning says.
FAILING = {
    "hangs": ("ask(); time.sleep(600)", {"command_timeout": 2.0}, "command_timeout=2 s"),
    "ignores signals": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", {"command_timeout": 2.0},
        "command_timeout=2 s",
    ),
    "floods the gateway": ("while True:\n    ask()", {"command_requests": 5}, "more than 5 requests"),
    "floods the gateway and does not mind errors": (
        "while True:\n    try:\n        ask()\n    except OSError:\n        pass", {"command_requests": 5},
        "more than 5 requests",
    ),
    "floods its output": ("while True:\n    sys.stdout.write('x' * 65536)", {}, "64 MiB"),
    "forks": (
        "for _ in range(40):\n    if os.fork() == 0:\n        time.sleep(600)\ntime.sleep(600)",
        {"command_processes": 20}, "more than rollout.agent.command_processes=20",
    ),
    "forks sessions of their own": (
        "for _ in range(40):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork()\n        time.sleep(600)\n"
        "time.sleep(600)", {"command_processes": 20}, "more than rollout.agent.command_processes=20",
    ),
    "uses memory": ("x = bytearray(os.urandom(1 << 20)) * 400; time.sleep(600)", {"command_memory_mb": 200},
                    "command_memory_mb=200"),
    "exits": ("ask(); print('no luck', file=sys.stderr); sys.exit(3)", {}, "exit code 3; it wrote: no luck"),
    "is killed": ("ask(); os.kill(os.getpid(), 9)", {}, "exit code -9"),
    "kills its guard": ("ask(); os.kill(os.getppid(), 9); time.sleep(600)", {}, "the process that supervises it"),
    "asks nothing": ("print(json.dumps({'reward': 1.0}))", {}, "without a request"),
    "has no reward": ("ask(); print('done')", {}, "without a reward"),
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a program's code for a row: (the code, keys of rollout.agent) -> (output, its warnings)."""
    monkeypatch.chdir(tmp_path)

    def run(code, answer=lambda prompt: "so 7<|im_end|>", row=None, length=400, **agent):
        (tmp_path / "agent.py").write_text(ASK + code)
        worker = worker_of(tmp_path / "model", answer, response_length=length, command="python agent.py 'a b'", **agent)
        with captured_warnings() as logged:
            output = asyncio.run(run_program(worker, **(row or {})))
        return worker, output, logged

    yield run
    assert not living(tmp_path)


def living(folder):
    """The processes whose working folder is this one: those of the programs, but for that of chat templates."""
    processes = []
    for process in psutil.process_iter():
        try:
            is_here = process.cwd() == str(folder) and process.status() != "zombie"
            if process.pid != os.getpid() and is_here and not any("template_process" in w for w in process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def test_programs_end_while_loaders_fork():
    """A process of a loader that inherited the pipes of a program would keep their reader from reaching the end."""
    endings, limits = [], Limits(60.0, 1 << 30, 8)

    def programs():
        for _ in range(10):
            endings.append(Program(["true"], {}, limits).run(b""))

    threads = [threading.Thread(target=programs, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    loaders = []  # their processes live as long as these
    while any(thread.is_alive() for thread in threads) and len(loaders) < 12:
        loaders.append(iter(PromptLoader(range(64), batch_size=4, num_workers=2)))
    for thread in threads:
        thread.join(40.0)
    assert [ending.exit_code for ending in endings] == [0] * 40 and loaders


def test_a_program_that_is_ended_before_it_starts_does_not_run():
    program = Program(["sleep", "60"], {}, Limits(60.0, 1 << 30, 8))
    program.end()
    assert program.run(b"").stopped == "owner"


@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_fails_is_lost_and_leaves_no_process(run, name):
    code, limits, said = FAILING[name]
    started = time.monotonic()
    worker, output, logged = run(code, **limits)
    assert is_lost(output) and output.extra_fields["end_reason"] == "program_failed"
    assert [line for line in logged if said in line], logged
    assert time.monotonic() - started < 60
    row = worker._batch_of([output])
    assert row.non_tensor_batch["__lost__"].tolist() == [True] and not row.batch["response_mask"].any()


@pytest.mark.parametrize("how", ["post('/reward', reward=0.25)", "print('x'); print(json.dumps({'reward': 0.25}))"])
def test_a_program_reports_its_reward(run, how):
    _, output, logged = run(f"assert ask() == 'so 7' and sys.argv[1:] == ['a b']\n{how}")
    assert output.reward_score == 0.25 and not logged and output.num_turns == 2
    assert output.extra_fields == {"end_reason": "stop", "weights_versions": [3]}
    assert output.metrics.tool_calls > 0


def test_a_conversation_whose_last_reply_was_cut_counts_as_cut(run):
    assert run("ask(); post('/reward', reward=1)", length=3)[1].extra_fields["end_reason"] == "length"


def test_the_reward_function_may_score_instead(run):
    _, output, _ = run("ask()", command_reward="function")
    assert output.reward_score is None and not is_lost(output)


def test_a_program_gets_the_row_and_a_clean_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    code = "ask(); json.dump([row, 'RANK' in os.environ, sys.executable], open('seen', 'w')); post('/reward', reward=1)"
    row = {"reward_model": {"ground_truth": "7"}, "extra_info": {"index": 4}, "data_source": "sums", "odd": object()}
    _, output, _ = run(code, row=row)
    seen, has_rank, python = json.loads((tmp_path / "seen").read_text())
    assert seen == {"prompt": [USER], "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 4},
                    "data_source": "sums"}  # fmt: skip
    assert not has_rank and os.path.dirname(python) == os.path.dirname(sys.executable)


def test_processes_that_a_program_leaves_behind_are_ended(run, tmp_path):
    leave = "if os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)\nask(); post('/reward', reward=1)"
    _, output, _ = run(leave)
    assert output.reward_score == 1.0 and not living(tmp_path)


def test_a_conversation_that_is_full_is_trained_even_if_its_program_fails_then(run):
    grows = "while True:\n    row['prompt'] += [{'role': 'assistant', 'content': ask()}] + row['prompt'][:1]"
    _, output, _ = run(grows, length=60)
    assert output.extra_fields["end_reason"] == "length" and output.reward_score == 0.0 and not is_lost(output)
    assert 0 < len(output.response_ids) <= 60


def test_a_run_that_starts_again_does_not_repeat_conversations_that_ended(run, tmp_path):
    code = "[ask() for _ in range(2)]; post('/reward', reward=0.5)"
    _, first, _ = run(code)
    assert len(first.extra_fields["turn_prompts"]) == 2
    for changed, runs in (("", 1), (" # other code", 2)):
        _, again, _ = run(code + changed)
        assert again.model_dump_json() == first.model_dump_json() or runs == 2
        assert len((tmp_path / "pids").read_text().split()) == runs
    run(code, command_journal=False)
    assert len((tmp_path / "pids").read_text().split()) == 3


async def test_a_cancelled_conversation_ends_its_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ASK + "time.sleep(600)")
    worker = worker_of(tmp_path / "model", None, command="python agent.py")
    task = asyncio.create_task(run_program(worker))
    while not (tmp_path / "pids").exists():
        await asyncio.sleep(0.05)
    assert living(tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not living(tmp_path)


def test_a_run_that_is_killed_leaves_no_process(tmp_path):
    code = "open('started', 'w').close(); import os, time; os.fork() or os.setsid(); time.sleep(600)"
    owner = f"""
from verl.agents.gateway.program import Limits, Program
Program([{sys.executable!r}, "-c", {code!r}], {{}}, Limits(600.0, 1 << 30, 9)).run(b"")
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", owner], cwd=tmp_path, env=environment)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert len(living(tmp_path)) >= 3
    process.kill()
    process.wait()
    assert becomes(lambda: not living(tmp_path))
