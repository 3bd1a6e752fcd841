"""Attempts to get out of the sandbox, each with the same code unconfined where that is harmless: it works there.

Not covered: faults of the kernel itself, and side channels of time.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.watched_runs import becomes
from verl.reward.sandbox import SandboxConfig, run_python

pytestmark = pytest.mark.process
SECRET = "canary-7f3a"
HEAD = """
import ctypes, os, resource, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
threading.stack_size(1 << 18)
def syscall(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "syscall %d" % numbers[0])
def reach(family, address, kind=socket.SOCK_STREAM):
    link = socket.socket(family, kind)
    link.settimeout(2)
    link.connect(address)
def read(path):
    assert "canary-7f3a" in open(path, errors="replace").read()
"""
# name -> (code that raises OSError or MemoryError when it is stopped, whether it works unconfined on any machine)
ATTEMPTS = {
    "loopback": ("reach(socket.AF_INET, ('127.0.0.1', PORT))", True),
    "loopback over IPv6": ("reach(socket.AF_INET6, ('::1', PORT))", False),
    "outside network": ("reach(socket.AF_INET, ('1.1.1.1', 53))", False),
    "outside network by datagrams": ("reach(socket.AF_INET, ('1.1.1.1', 53), socket.SOCK_DGRAM)", False),
    "metadata service": ("reach(socket.AF_INET, ('169.254.169.254', 80))", False),
    "hypervisor socket": ("socket.socket(40, socket.SOCK_STREAM)", False),
    "abstract socket": ("reach(socket.AF_UNIX, ABSTRACT)", True),
    "socket file": ("reach(socket.AF_UNIX, FOLDER + '/socket')", True),
    "home": ("read(HOME)", True),
    "password file": ("open('/etc/passwd').read()", True),
    "hidden tests": ("read(FOLDER + '/hidden.json')", True),
    "parent environment": ("read('/proc/%d/environ' % PARENT)", True),
    "own environment": ("assert [v for v in os.environ.values() if 'canary' in v] or os.stat('/no')", False),
    "parent memory": ("open('/proc/%d/mem' % PARENT, 'rb')", True),
    "parent memory by process_vm_readv": ("syscall(310, PARENT, 0, 0, 0, 0, 0)", True),
    "parent command line": ("open('/proc/%d/cmdline' % PARENT).read()", True),
    "kill the parent": ("os.kill(PARENT, 0)", True),
    "trace the parent": ("syscall(101, 16, PARENT, 0, 0)", False),
    "take a descriptor of the parent": ("syscall(438, os.pidfd_open(PARENT), 0, 0)", False),
    "inherited descriptors": ("[os.fstat(n) for n in range(3, 4096) if not closed(n)] or os.stat('/no')", False),
    "symlink out": ("os.symlink('/etc/passwd', 'x')", True),
    "write to the library": ("open('/usr/lib/verl_x', 'w')", False),
    "write to the root": ("os.mkdir('/verl_x')", False),
    "write next to the tests": ("open(FOLDER + '/written', 'w')", True),
    "make the root writable": ("syscall(165, 0, id(b'/') + 32, 0, 32, 0)", False),
    "mount": ("assert libc.mount(b'proc', b'/tmp', b'proc', 0, None) == 0 or os.stat('/no')", False),
    "change the root": ("os.chroot('.')", False),
    "new user namespace": ("syscall(272, 0x10000000)", False),
    "become root": ("os.setuid(0)", False),
    "make a device": ("os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))", False),
    "devices": ("os.listdir('/dev') == ['null'] and os.stat('/no')", True),
    "fork": ("os.fork() or os._exit(0)", True),
    "another program": ("subprocess.run([sys.executable, '-c', ''], check=True)", True),
    "process that outlives": ("os.fork() or (os.setsid(), os._exit(0))", True),
    "shed the death signal": ("assert libc.prctl(1, 0, 0, 0, 0) == 0 or os.stat('/no')", True),
    "raise the limits": ("resource.setrlimit(resource.RLIMIT_CPU, (900, 900))", False),
    "memory": ("bytearray(2 << 30)", False),
    "memory in pieces": ("[bytearray(64 << 20) for _ in range(40)]", False),
    "memory in a nameless file": ("os.memfd_create('x')", True),
    "memory in segments": ("syscall(29, 0, 1 << 28, 0o1600)", False),
    "disk, one file": ("open('x', 'wb').write(bytes(64 << 20))", False),
    "disk, many files": ("[open('x%d' % i, 'wb').write(bytes(1 << 20)) for i in range(64)]", True),
    "files without end": ("[open('y%d' % i, 'wb') and None for i in range(5000)]", False),
    "threads": ("[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(64)]", True),
    "kernel keys": ("syscall(248, id(b'user') + 32, id(b'k') + 32, id(b'v') + 32, 1, -3)", False),
    "io_uring": ("syscall(425, 1, id(bytes(120)) + 32)", False),
    "bpf": ("syscall(321, 0, 0, 0)", False),
    "personality": ("syscall(135, 0xFFFFFFFF)", True),
    "descriptor tables": ("syscall(154, 0, 0, 0)", True),
    "large socket buffers": ("socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)", True),
    "filter of a socket": (
        "import struct\n"
        "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xFFFF), 8)\n"
        "socket.socketpair()[0].setsockopt(1, 26, struct.pack('HxxxxxxQ', 1, ctypes.addressof(code)))", True,
    ),
    "timers": ("number = ctypes.create_string_buffer(8)\nsyscall(222, 0, 0, ctypes.addressof(number))", True),
    "handle of a process": ("os.pidfd_open(os.getpid())", True),
    "message queue": ("syscall(68, 0, 0o1600)", False),
    "semaphores": ("syscall(64, 0, 1, 0o1600)", False),
    "sealed memory": ("syscall(462, 0, 0, 0)", False),
    "server": ("socket.create_server(('127.0.0.1', 0))", True),
    "a call of a later kernel": ("syscall(600, 0, 0)", False),
    "x32 numbers": ("syscall(0x40000000 + 41, 2, 1, 0)", False),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What the attempts aim at, for real: listening sockets, files, this process with a secret in its environment."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "hidden.json").write_text(json.dumps({"outputs": [SECRET]}))
    home = Path.home() / f".verl-escape-{os.getpid()}"
    home.write_text(SECRET)
    abstract = f"\0verl-escape-{os.getpid()}"
    sockets = [socket.create_server(("127.0.0.1", 0))]
    for address in (abstract, str(folder / "socket")):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(address)
        sockets[-1].listen(64)
    parent = subprocess.Popen(["sleep", "600"], env={"SECRET": SECRET})
    names = {
        "PORT": sockets[0].getsockname()[1], "ABSTRACT": abstract, "FOLDER": str(folder), "HOME": str(home),
        "PARENT": parent.pid,
    }  # fmt: skip
    os.environ["SANDBOX_SECRET"] = SECRET
    leaked = os.open(folder / "hidden.json", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    yield names
    home.unlink()
    os.close(leaked)
    del os.environ["SANDBOX_SECRET"]
    parent.kill()
    parent.wait()
    for listening in sockets:
        listening.close()


def tried(code, names, **limits):
    """What became of an attempt: ('GOT', '') or ('STOPPED', error), or how the program was killed."""
    assignments = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    closed = "def closed(n):\n    try: os.fstat(n)\n    except OSError: return True\n"
    body = textwrap.indent(code, "    ")
    program = (
        f"{HEAD}{assignments}{closed}try:\n{body}\nexcept (OSError, MemoryError, RuntimeError, ValueError) as error:\n"
        "    print('STOPPED', repr(error))\nelse:\n    print('GOT')\nsys.stdout.flush()\nos._exit(0)\n"
    )
    outcome = run_python(program, limits=SandboxConfig(seconds=5, **limits))
    said = outcome.stdout.decode()
    assert said or outcome.exit_code < 0, f"the attempt itself is at fault: {outcome.stderr.decode()}"
    return said.split(" ", 1) if said else ["STOPPED", f"signal {-outcome.exit_code}"]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_does_not_get_out(name, world, confined):
    verdict, *how = tried(ATTEMPTS[name][0], world, memory_mb=512, disk_mb=16)
    assert verdict == "STOPPED", how
    assert psutil.pid_exists(world["PARENT"])


@pytest.mark.parametrize("name", [name for name, (_, works) in ATTEMPTS.items() if works])
def test_the_same_works_unconfined(name, world):
    assert tried(ATTEMPTS[name][0], world, unconfined=True, disk_mb=64)[0].strip() == "GOT"


def test_what_programs_need_works(confined):
    program = """
import asyncio, concurrent.futures, os, pathlib, random, resource, select, shutil, signal, sqlite3, tempfile, time
async def both():
    return sum(await asyncio.gather(asyncio.to_thread(len, "a"), asyncio.sleep(0.01, 2)))
with concurrent.futures.ThreadPoolExecutor(3) as pool, tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "a")
    file.write_text("7")
    shutil.copy(file, file.with_suffix(".b"))
    os.rename(file, file.with_suffix(".c"))
    names = sorted(path.name for path in pathlib.Path(folder).iterdir())
    sqlite3.connect(pathlib.Path(folder, "d")).execute("create table t (x)")
    print(asyncio.run(both()), sum(pool.map(len, ["ab", "c"])), names, os.path.getsize(file.with_suffix(".b")))
caught = []
signal.signal(signal.SIGALRM, lambda *got: caught.append(got[0]))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
print(caught, random.SystemRandom().random() < 1, resource.getrusage(0).ru_maxrss > 0, bool(os.sched_getaffinity(0)))
"""
    outcome = run_python(program, limits=SandboxConfig(seconds=20, disk_mb=16))
    assert outcome.stderr == b"" and outcome.stdout == b"3 3 ['a.b', 'a.c'] 1\n[14] True True True\n"


def test_it_sees_its_own_file_and_libraries_alone(confined):
    seen = run_python("import os; print(sorted(os.listdir('/tmp')), os.getpid(), os.getppid(), os.getuid())").stdout
    assert seen == b"['main.py'] 1 0 1000\n"


def test_packages_are_masked_in_every_library(confined):
    libraries = [Path(sys.base_prefix, "lib"), Path("/usr/lib")]
    folders = [str(folder) for library in libraries for name in ("site-packages", "dist-packages")
               for folder in library.glob(f"python*/{name}")]  # fmt: skip
    program = f"import os\nprint([x for f in {folders} if os.path.isdir(f) for x in os.listdir(f)])\n"
    program += "for name in ('pip', 'yaml'):\n    try: print(__import__(name))\n    except ImportError: pass"
    outcome = run_python(program)
    assert (outcome.stdout, outcome.stderr) == (b"[]\n", b"")


def test_a_copy_of_python_in_its_folder_is_not_executed_with_or_without_set_uid(world, confined):
    for mode in (0o755, 0o6755):
        code = f"import shutil; shutil.copy(sys.executable, 'p'); os.chmod('p', {mode})\n"
        code += "os.execv('p', [sys.executable, '-I', '-S', '-c', 'print(\"GOT\")'])"
        verdict, how = tried(code, world, memory_mb=512, disk_mb=64)
        assert verdict == "STOPPED" and "Permission denied" in how
        assert tried(code, world, unconfined=True, disk_mb=64)[0].strip() == "GOT"


def test_gigabytes_of_output_are_cut_and_end_it(confined):
    before = psutil.Process().memory_info().rss
    outcome = run_python("import sys\nwhile True: sys.stdout.write('x' * 1000000)", limits=SandboxConfig(output_kb=100))
    assert outcome.stopped == "output" and len(outcome.stdout) == 100 << 10
    outcome = run_python("import os\nwhile True: os.write(2, b'x' * 100000)", limits=SandboxConfig(seconds=2))
    assert outcome.stopped == "time" and len(outcome.stderr) == 16 << 10
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_what_does_not_end_is_killed(code, confined):
    began = time.monotonic()
    outcome = run_python(code, limits=SandboxConfig(seconds=0.4))
    assert outcome.stopped == "time" and not outcome.ok
    assert time.monotonic() - began < 30


def marked(mark):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


def test_nothing_is_alive_afterwards(confined):
    mark = f"verl-survivor-{os.getpid()}"
    code = f"""
        import os, sys, signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        try: os.setsid()
        except OSError: pass
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
    """
    survivors, ended = [], threading.Event()

    def watch():
        while not survivors and not ended.wait(0.05):
            survivors.extend(marked(mark))

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = run_python(textwrap.dedent(code), limits=SandboxConfig(seconds=6))
    ended.set()
    watcher.join()
    assert outcome.stopped == "time" and len(survivors) == 1 and marked(mark) == []


@pytest.mark.parametrize("victim", ["caller", "jail"])
def test_it_dies_with_its_keepers(victim, tmp_path, confined):
    mark = f"verl-orphan-{victim}-{os.getpid()}"
    inner = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"
    script = "from verl.reward.sandbox import run_python, SandboxConfig\n"
    script += f"run_python({inner!r}, b'', SandboxConfig(seconds=60))"
    file = tmp_path / "caller.py"
    file.write_text(script)
    caller = subprocess.Popen([sys.executable, str(file)], stderr=subprocess.DEVNULL)
    try:
        assert becomes(lambda: marked(mark), 30)
        (program,) = marked(mark)
        keeper = caller.pid if victim == "caller" else psutil.Process(program).ppid()
        os.kill(keeper, signal.SIGKILL)
        assert becomes(lambda: not marked(mark), 30)
    finally:
        caller.kill()
        caller.wait()
