"""Programs against test cases: right and wrong ones, attempts on the verdict, the remote service over real HTTP."""

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import tenacity

from tests.helpers.http_server import serving
from verl.reward.pool import Slots
from verl.reward.rules import default_compute_score, prime_code, sandbox_fusion
from verl.reward.rules.code_cases import Case, cases_of, extract_code, same_output, same_value
from verl.reward.sandbox import SandboxConfig

SUMS = {"inputs": ["1 2\n", "30 12\n"], "outputs": ["3\n", "42\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [30, 12]], "outputs": [3, 42]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def answer(code):
    return f"First I think.\n```python\n{code}\n```\nDone."


def score(code, cases, **settings):
    return prime_code.compute_score(answer(code), cases, continuous=True, **settings)[0]


@pytest.mark.process
@pytest.mark.parametrize(
    "code, cases, share",
    [
        (ADD, SUMS, 1.0),
        ("a, b = map(int, input().split())\nprint(3)", SUMS, 0.5),
        ("print('3'\n", SUMS, 0.0),
        ("def add(a, b):\n    return a + b", CALLS, 1.0),
        ("class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b", CALLS, 1.0),
        ("def add(a, b):\n    print('debug')\n    return [3]", {**CALLS, "outputs": [[3], [[3]]]}, 1.0),
        ("def add(a, b):\n    return (a, str(b))", {**CALLS, "outputs": [[1, "2"], '[30, "12"]']}, 1.0),
        ("def add(s, n):\n    return s * n", {"fn_name": "add", "inputs": ['"ab"\n2'], "outputs": ['"abab"']}, 1.0),
    ],
)
def test_share_of_cases_passed(code, cases, share, confined):
    assert score(code, cases) == share


@pytest.mark.process
def test_all_or_nothing_stops_at_the_first_failure(confined):
    result, reports = prime_code.compute_score(answer("print(42)"), SUMS)
    assert result == 0.0 and len(reports) == 1
    assert prime_code.compute_score(answer(ADD), SUMS)[0] == 1.0
    assert default_compute_score("taco", answer("input()\nprint(42)"), SUMS) == 0.5


@pytest.mark.process
def test_a_program_that_hangs_is_not_run_again(confined):
    limits = SandboxConfig(seconds=0.3)
    result, reports = prime_code.compute_score(answer("while True: pass"), SUMS, continuous=True, sandbox=limits)
    assert result == 0.0 and [t["stopped"] for t in reports] == ["time"]


CHEATS = {
    "exit code 0": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "equal to everything": """
class Same:
    def __eq__(self, other): return True
    def __str__(self): return 'True'
    __repr__ = __str__
    __hash__ = None
def add(a, b): return Same()
print(Same())""",
    "a number equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return Same(0)
print(Same(0))""",
    "a text equal to everything": """
class Same(str):
    def __eq__(self, other): return True
    def split(self, *a): return self
    __hash__ = str.__hash__
def add(a, b): return Same('x')
print(Same('x'))""",
    "patched builtins": """
import builtins, operator
builtins.all = builtins.any = lambda *a: True
builtins.isinstance = lambda *a: True
builtins.len = lambda *a: 1
operator.eq = lambda a, b: True
def add(a, b): return None
print(None)""",
    "patched json": """
import json
json.dumps = lambda *a, **k: 'true'
json.loads = lambda *a, **k: [0, 0]
def add(a, b): return True
print('true')""",
    "patched grader": """
import sys, types
grader = types.ModuleType('verl.reward.rules.code_cases')
grader.same_output = grader.same_value = lambda *a: True
for name in ('verl', 'verl.utils', 'verl.reward.rules', 'verl.reward.rules.code_cases'):
    sys.modules[name] = grader
def add(a, b): return 0
print(0)""",
    "forged output": """
def add(a, b): return 'passed'
print('{"passed": true, "score": 1.0}')
print('PASSED')""",
    "forged report on every descriptor": """
import os
for number in range(3, 256):
    try: os.write(number, b'{"exit": 0, "timeout": false, "seconds": 0.1}')
    except OSError: pass
def add(a, b): return 0
print(0)""",
    "forged result file": """
for name in ('result.json', 'output.txt', 'exit_code', '/tmp/result', '../verdict'):
    try: open(name, 'w').write('{"passed": true}')
    except OSError: pass
def add(a, b): return 0
print(0)""",
    "looks for the expected output": """
import gc, os, sys
seen = [open(os.path.join(d, f), errors='replace').read() for d, _, fs in os.walk('/tmp') for f in fs]
values = [repr(sys.argv), repr(dict(os.environ)), *seen]
frame = sys._getframe()
while frame:
    values.append(repr(frame.f_globals)); frame = frame.f_back
values = ''.join(values + [repr(o)[:200] for o in gc.get_objects() if isinstance(o, (list, dict, tuple))])
wanted = '4567890'.join(['', '1234567'])
def add(a, b): return int(wanted) if wanted in values else 0
print(add(0, 0))""",
    "not a number": "def add(a, b): return float('nan')\nprint('nan')",
    "deep nesting": "import sys\nsys.setrecursionlimit(10**6)\ndef add(a, b): return 0\nprint('[' * 100000)",
    "a long number": "def add(a, b): return 0\nprint('9' * 100000)",
    "nearly a long number": "def add(a, b): return 0\nprint('9' * 400000 + 'x')",
    "the answer of the first case": "def add(a, b): return 3\nprint(3)",
}


@pytest.mark.process
@pytest.mark.parametrize("kind", ["output", "call"])
@pytest.mark.parametrize("name", CHEATS)
def test_no_verdict_is_won_without_the_right_output(name, kind, confined):
    expected = 45678901234567  # long: the addresses that a program sees hold any four digits now and then
    cases = {"inputs": ["1 2"], "outputs": [str(expected)]}
    if kind == "call":
        cases = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [expected]}
    started = time.process_time()
    result, reports = prime_code.compute_score(answer(CHEATS[name]), cases, continuous=True)
    assert result == 0.0, reports
    assert time.process_time() - started < 1.0  # the judge's own; the program has processes of its own


@pytest.mark.process
def test_an_unconfined_run_needs_the_word(tmp_path):
    """The kernel itself refuses here: a user namespace in which no further one may be made."""
    script = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid = os.getuid()
if libc.unshare(0x10000000): print('no namespaces at all')
else:
    open('/proc/self/setgroups', 'w').write('deny')
    open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')
    open('/proc/sys/user/max_user_namespaces', 'w').write('0')
os.setgroups = lambda groups: None  # what is left of root here cannot, nor need it
os.setresgid = os.setresuid = lambda *ids: None
from verl.reward.sandbox import run_python, SandboxConfig, SandboxUnavailable
try: print('RAN', run_python('print(1)').stdout)
except SandboxUnavailable as refusal: print('REFUSED', refusal)
print('UNCONFINED', run_python('print(1)', limits=SandboxConfig(unconfined=True)).stdout)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "REFUSED this machine cannot confine programs (" in ran.stdout, ran.stdout + ran.stderr
    assert "reward_model.sandbox.unconfined=true" in ran.stdout and "sandbox_fusion.url" in ran.stdout
    assert "A code tool reads neither key: set unconfined: true in its own config." in ran.stdout
    assert "UNCONFINED b'1\\n'" in ran.stdout and "RAN" not in ran.stdout


def test_code_is_the_last_fenced_block():
    assert extract_code("```python\na\n```\n```py\nb\n```") == "b\n"
    assert extract_code("```\na") == "a" and extract_code("print(1)") is None
    assert prime_code.compute_score("print(1)", SUMS)[0] == 0.0


@pytest.mark.parametrize(
    "tests", ["[]", {"inputs": ["1"]}, {"inputs": [], "outputs": []}, {"inputs": [1], "outputs": []}]
)
def test_cases_that_are_none_are_an_error(tests):
    with pytest.raises(ValueError, match="test cases"):
        cases_of("", tests)


def test_expected_outputs_stay_outside():
    for cases in (cases_of(ADD, SUMS), cases_of("def add(a, b): pass", CALLS)):
        assert all("42" not in case.program + case.stdin for case in cases)


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("1000000007", "1000000008", False),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        (".5", "0.5", True),
        ("-1e-1", "-0.1", True),
        ("1e", "1.0", False),
        pytest.param("9" * 400_000 + "x", "0.5", False, id="nearly a long number"),
    ],
)
def test_outputs_are_compared_by_lines_and_words(output, expected, same):
    started = time.process_time()
    assert same_output(output, expected) is same
    assert time.process_time() - started < 1.0


def test_values_are_compared_as_json():
    assert same_value([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}]) and same_value(1.0, 1)
    for value, expected in ((True, 1), (1, True), ("1", 1), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0), (0.5, "x")):
        assert not same_value(value, expected)
    beyond = 10**400  # every float
    assert not same_value(beyond, 0.5) and not same_value(0.5, beyond) and same_value(beyond, beyond)
    assert not Case("", "", 0.5, True).passes("9" * 400)


@pytest.fixture
def service(monkeypatch):
    """A server that speaks the SandboxFusion protocol and runs the program for real; `broken`: replies that fail."""
    monkeypatch.setattr(sandbox_fusion._post.retry, "wait", tenacity.wait_none())
    state = SimpleNamespace(lock=threading.Lock(), running=0, most=0, broken=[])

    def answer(request):
        body = request.body
        with state.lock:
            state.running += 1
            state.most = max(state.most, state.running)
            broken = state.broken.pop() if state.broken else None
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", body["code"]], input=body["stdin"], capture_output=True, text=True
        )
        with state.lock:
            state.running -= 1
        if broken == "sandbox":
            return 200, {"status": "SandboxError", "message": "no pod", "run_result": None}
        result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout, "stderr": ran.stderr}
        status = "Success" if ran.returncode == 0 else "Failed"
        return broken or 200, {"status": status, "message": "", "run_result": result}

    with serving(answer) as (url, state.bodies):
        state.url = f"{url}/run_code"
        yield state


@pytest.mark.process
def test_the_service_runs_programs_and_learns_no_expected_output(service):
    code = "a, b = map(int, input().split())\nprint(a + b if a < 9 else 0)"
    share, reports = sandbox_fusion.compute_score(service.url, Slots(1), 256, answer(code), SUMS, continuous=True)
    assert share == 0.5 and [t["passed"] for t in reports] == [True, False]
    assert service.most == 1 and len(service.bodies) == 2
    assert all("42" not in json.dumps(body["code"]) for body in service.bodies)
    assert service.bodies[0]["memory_limit_MB"] == 256 and service.bodies[0]["language"] == "python"
    assert default_compute_score("apps", answer(code), SUMS, sandbox_fusion_url=service.url) == 0.5
    assert service.bodies[-1]["run_timeout"] == 10
    limits = SandboxConfig(seconds=3.0)
    assert default_compute_score("apps", answer(code), SUMS, sandbox_fusion_url=service.url, sandbox=limits) == 0.5
    assert service.bodies[-1]["run_timeout"] == service.bodies[-1]["compile_timeout"] == 3.0
    call = answer("def add(a, b):\n    return a + b")
    assert sandbox_fusion.compute_score(service.url, None, None, call, CALLS)[0] == 1.0
    assert sandbox_fusion.compute_score(service.url, None, None, answer("1/0"), CALLS)[0] == 0.0


@pytest.mark.process
def test_each_case_of_a_program_has_a_result_and_a_report(service):
    cases = {"inputs": ["3 4", "5 6", "7 8"], "outputs": ["8", "11", "15"]}
    code = "import sys\na, b = map(int, input().split())\nif a == 5: sys.exit(3)\nprint(a + b)"
    results, reports = sandbox_fusion.check_correctness(service.url, cases, code, concurrent_semaphore=Slots(1))
    assert results == [False, -2, True] and service.most == 1
    assert reports[0]["stdout"] == "7\n" and reports[0]["input"] == "3 4"
    assert reports[1]["exit_code"] == 3 and reports[2]["expected_output"] == "15"
    service.broken = [400]  # one of the three requests; the others are answered
    results, reports = sandbox_fusion.check_correctness(service.url, {**cases, "outputs": ["7", "1", "15"]}, "print(1)")
    unanswered = results.index(-1)
    assert "answered 400" in reports[unanswered]["api_request_error"]
    assert [r for i, r in enumerate(results) if i != unanswered] == [i == 1 for i in range(3) if i != unanswered]
    call = "def add(a, b):\n    return a + b"
    assert sandbox_fusion.check_correctness(service.url, CALLS, call)[0] == [True] * len(CALLS["inputs"])
    for language, said in (("cpp", "fn_name works with Python programs only, not cpp"), ("c", "'c' is unknown")):
        with pytest.raises(ValueError, match=said):
            sandbox_fusion.check_correctness(service.url, CALLS, call, language=language)
    reply, error = sandbox_fusion.call_sandbox_api(service.url, "print(1)", None, 10, 10, 64)
    assert error is None and reply["run_result"]["stdout"] == "1\n"
    refused = sandbox_fusion.call_sandbox_api(service.url, "", None, 1, 1, 64, "cobol")
    assert refused[0] is None and refused[1].startswith("language 'cobol' is unknown")


@pytest.mark.parametrize(
    ("reply", "result", "status"),
    [
        ({"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}}, -4, "compile_error"),
        ({"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}}, -3, "compile_timeout"),
        ({"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}, -3, "timeout"),
        ({"status": "Failed", "run_result": {"status": "Finished", "return_code": 1}}, -2, "runtime_error"),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "3"}}, True, "success"),
        ({"status": "Success", "run_result": {"return_code": 0, "stdout": "4"}}, False, "wrong_answer"),
    ],
)
def test_replies_become_results(reply, result, status):
    _, case = cases_of("code", {"inputs": ["", "1 2"], "outputs": ["", "3"]})
    given, report = sandbox_fusion.verdict(case, reply)
    assert given is result
    assert (report["status"], report["api_status"], report["case_index"]) == (status, reply["status"], 1)


@pytest.mark.process
async def test_a_program_is_judged_where_an_event_loop_runs(service):
    assert default_compute_score("apps", answer(ADD), SUMS, sandbox_fusion_url=service.url) == 1.0


@pytest.mark.process
def test_a_service_that_fails_is_asked_again(service):
    service.broken = ["sandbox", 503]
    assert sandbox_fusion.compute_score(service.url, None, None, answer(ADD), SUMS)[0] == 1.0
    assert len(service.bodies) == 4


@pytest.mark.process
def test_a_service_without_a_verdict_is_an_error_and_no_score(service):
    service.broken = [400] * 2
    with pytest.raises(sandbox_fusion.SandboxServiceError, match="answered 400"):
        sandbox_fusion.compute_score(service.url, None, None, answer(ADD), SUMS)
    service.broken = [500] * 10
    with pytest.raises(sandbox_fusion.SandboxServiceError, match="answered 500"):
        sandbox_fusion.compute_score(service.url, None, None, answer(ADD), SUMS)
    with pytest.raises(sandbox_fusion.SandboxServiceError, match="no answer in 5 attempts.*sandbox_fusion.url"):
        sandbox_fusion.compute_score("http://127.0.0.1:9/run_code", None, None, answer(ADD), SUMS)
