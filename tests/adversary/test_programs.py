"""Programs that a model may write: each is a failed answer, not a fault of the machine."""

import pytest

from tests.helpers.sandbox import refused
from verl.reward.sandbox import SandboxConfig, run_python

PROGRAMS = {
    "larger than the disk": "#" * (1 << 20) + "\n",
    "larger than the disk in bytes only": "#" + "\u2603" * (1 << 19),
    "one line without end": "x = [" + "1," * (1 << 19) + "]",
    "not UTF-8": "# \udcff\nprint(1)",
    "a NUL": "print(1)\x00",
    "no Python": "```python\nprint(1)\n```",
    "nested too deeply": "(" * 10_000 + ")" * 10_000,
    "a number of many digits": "print(" + "9" * 10_000 + ")",
    "fills the disk": "open('x', 'wb').write(bytes(2 << 20))",
    "removes itself": "import os; os.unlink('main.py'); raise SystemExit(3)",
    "ends without a word": "import os; os._exit(1)",
    "closes its pipes": "import os; os.close(0); os.close(1); os.close(2); os._exit(5)",
    "signals itself": "import os; os.kill(os.getpid(), 11); os.abort()",
}


@pytest.mark.process
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_cannot_run_is_a_failed_answer(name, request):
    if refused(request):
        return
    outcome = run_python(PROGRAMS[name], limits=SandboxConfig(seconds=10, disk_mb=1, memory_mb=512))
    assert not outcome.ok and outcome.exit_code != 0 and outcome.stdout == b""


def test_a_program_larger_than_its_disk_says_so():
    outcome = run_python("#" * ((1 << 20) + 1), limits=SandboxConfig(disk_mb=1))
    assert outcome.stderr == b"the program has 1048577 bytes, sandbox.disk_mb allows 1048576"
