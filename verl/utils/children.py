"""Child processes with limits, which end with this process however it ends (SIGKILL included).

- `ForkedChild` calls a function in a fork of this process; the function need not be picklable.
- `SpawnedChild` calls a function in a process of multiprocessing's fork server, which shares no memory with this one.
- `Program` executes a program, which sends and receives messages over one of its file descriptors.

Each is a `Child`. `verl.utils.supervisor` is what runs inside the processes and ends them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from types import ModuleType
from typing import Any, BinaryIO

import psutil

from verl.utils import supervisor
from verl.utils.supervisor import end_with_parent, guard, kill_when_closed

_MEMORY_BYTES = 4 << 30  # that a process of the fork server may allocate beyond what it starts with
_LAST_OUTPUT_S = 1.0  # for reading what an ended program has written: another process may keep a pipe open
#: The rendezvous of the trainer's ranks must not reach programs.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Held while a process starts. A process that another thread forks meanwhile would inherit the ends of its pipes that
#: are closed once it has started, and then a reader of these pipes waits for both processes to end.
PROCESS_STARTS = threading.RLock()
os.register_at_fork(after_in_child=PROCESS_STARTS._at_fork_reinit)  # the child lacks the thread that may hold it


class ChildDied(RuntimeError):
    """A process ended without an answer; the message has its exit code."""

    def __init__(self, name: str, exit_code: int | None) -> None:
        super().__init__(f"{name}: its process ended with exit code {exit_code}")
        self.exit_code = exit_code


class ProcessorSeconds(float):
    """A time limit in seconds of processor time, so that a busy machine does not use it up.

    Functions here take it in place of seconds by the clock. A call that waits without computing ends after WALL times
    as many seconds by the clock.
    """

    WALL = 20


class Child:
    """A child process, and this process's end of the connection to it. Only one thread at a time may use it."""

    def __init__(self, name: str, process: Any, connection: Connection) -> None:
        self.name, self.process, self.connection = name, process, connection
        self.gone = False  # whether `end` was called

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    def call(self, seconds: float, /, *args: Any, **kwargs: Any) -> Any:
        """What the function that the child serves returns, or raises. Raises as `ask`; all of it is pickled."""
        limit = float(seconds) if isinstance(seconds, ProcessorSeconds) else 0.0
        # Not `connection.send`: it would share a tensor's memory, which a killed process may keep.
        returned, value = self._answer(seconds, pickle.dumps((limit, args, kwargs)), self.connection.recv)
        if not returned:
            raise value
        return value

    def ask(self, seconds: float, request: bytes) -> bytes:
        """The answer to a request, as bytes. After TimeoutError or ChildDied it is `gone`: create another.

        `seconds` by the clock; or ProcessorSeconds, for which the process has a timer that ends it by SIGPROF.
        """
        return self._answer(seconds, request, self.connection.recv_bytes)

    def _answer(self, seconds: float, request: bytes, receive: Callable[[], Any]) -> Any:
        try:
            self.connection.send_bytes(request)
            by_clock = seconds * seconds.WALL if isinstance(seconds, ProcessorSeconds) else seconds
            if not self.connection.poll(by_clock):
                raise TimeoutError
            return receive()
        except (EOFError, ConnectionError, TimeoutError) as error:
            code = self.end()
            if isinstance(error, TimeoutError) or code == -signal.SIGPROF:
                raise TimeoutError(f"{self.name} took longer than {seconds} s") from None
            raise ChildDied(self.name, code) from error
        except BaseException:  # an answer left in the pipe would be taken for that of the next request
            self.end()
            raise

    def end(self) -> int | None:
        """Kill it and return its exit code; None if that was done before, or if no codes are kept (SIGCHLD ignored)."""
        if self.gone:
            return None
        self.gone = True
        code = self._kill()
        self.connection.close()
        return code

    def _kill(self) -> int | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        code = self.process.wait()
        return None if code is None else int(code)


def serve(connection: Connection, function: Callable) -> None:
    """In a child: answer each `call` by the result of the function or its exception, until the owner is gone."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, also within C code
    while True:
        try:
            processor_seconds, args, kwargs = connection.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, processor_seconds)  # none for 0
        try:
            answer = pickle.dumps((True, function(*args, **kwargs)))
        except Exception as error:
            try:
                answer = pickle.dumps((False, copy.copy(error)))
            except Exception:  # it cannot be made again: for example its __init__ needs more than its message
                answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


class ForkedChild(Child):
    """A forked process that serves calls of `function`. It dies with the thread that created it.

    Also for daemonic processes, such as grading workers, to which multiprocessing refuses a child.
    """

    def __init__(self, function: Callable) -> None:
        caller = os.getpid()
        with PROCESS_STARTS:
            connection, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    connection.close()
                    end_with_parent(signal.SIGKILL, caller)  # an endless call must not outlive its caller
                    serve(theirs, function)
                except OSError as error:  # the kernel refused: the answer to the first call
                    theirs.recv_bytes()
                    theirs.send_bytes(pickle.dumps((False, error)))
                finally:
                    os._exit(0)
            theirs.close()
        super().__init__(function.__qualname__, psutil.Process(pid), connection)


class SpawnedChild(Child):
    """A process of the fork server that runs `target(connection, *arguments)`, with a limit on its memory.

    If it `leads_group`, what it starts is killed with it. The fork server imports `preload` when it starts, so that a
    killed process is replaced in milliseconds.
    """

    def __init__(
        self, target: Callable, *arguments: Any, preload: Sequence[str] = (), leads_group: bool = False
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *preload])
        with PROCESS_STARTS:
            connection, theirs = context.Pipe()
            life, self._alive = context.Pipe(duplex=False)  # open as long as this process lives
            given = (theirs, life, leads_group, target, arguments)
            process = context.Process(target=_begin, args=given, daemon=True)
            # It imports nothing of the script that was started, which may have no `if __name__ == "__main__"`.
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                process.start()
            finally:
                sys.modules["__main__"] = main
            theirs.close()
            life.close()
        self._leads_group = leads_group
        super().__init__(target.__qualname__, process, connection)

    def _kill(self) -> int | None:
        with PROCESS_STARTS:  # a start reads the exit codes of all processes, and a code can be read only once
            if self._leads_group and self.process.is_alive():  # else its guard ends the group
                with contextlib.suppress(ProcessLookupError):  # it does not lead it yet
                    os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()
        self._alive.close()
        return self.process.exitcode


def _begin(connection: Connection, life: Connection, leads_group: bool, target: Callable, arguments: tuple) -> None:
    if leads_group:
        os.setsid()
        guard(os.getpid(), connection.fileno(), life.fileno())
    kill_when_closed(life.fileno())  # by the owner's end: the fork server outlives it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    target(connection, *arguments)


class Program(Child):
    """An executed program, which ends when the other end of its connection is closed.

    Args:
        script, arguments: the command line; between them comes the number of the descriptor.
        stdin: its standard input.
        options: of subprocess.Popen.
    """

    def __init__(
        self, script: Sequence[str], arguments: Sequence[str] = (), stdin: bytes = b"", **options: Any
    ) -> None:
        with PROCESS_STARTS, _file_of(stdin) as given:
            connection, theirs = Pipe()
            with theirs:
                descriptor = theirs.fileno()
                command = [*script, str(descriptor), *arguments]
                process = subprocess.Popen(command, stdin=given, pass_fds=[descriptor], **options)
        self._closing, self._leads_group = threading.Lock(), options.get("start_new_session", False)
        super().__init__(script[-1], process, connection)

    def stop(self) -> None:
        """Ask it to end and to report; any thread may do so."""
        with self._closing, contextlib.suppress(OSError):
            self.connection.send_bytes(b"stop")

    def outputs(self, seconds: float, take: Callable[[int, bytes], bool]) -> bytes:
        """Read the outputs, which must be pipes; returns the program's report, b"" if there is none in `seconds`.

        `take(descriptor, part)` gets what the program writes to 1 and 2. Where it returns False, that is too much: the
        program is stopped and the rest discarded.
        """
        lock, too_much = threading.Lock(), []

        def read(descriptor: int, pipe: Any) -> None:
            with pipe:
                while part := pipe.read1(1 << 16):
                    with lock:
                        if not too_much and not take(descriptor, part):
                            too_much.append(descriptor)
                            self.stop()

        pipes = {1: self.process.stdout, 2: self.process.stderr}
        threads = [threading.Thread(target=read, args=item, daemon=True) for item in pipes.items()]
        for thread in threads:
            thread.start()
        report = b""
        with contextlib.suppress(EOFError, OSError):  # it was killed
            if self.connection.poll(seconds):
                report = self.connection.recv_bytes(1 << 16)
        for thread in threads:
            thread.join(_LAST_OUTPUT_S)
        return report

    def end(self, grace: float = 0.0) -> int | None:
        """Close the connection, and kill the program if it has not ended after `grace` seconds."""
        with self._closing:
            self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        return super().end()

    def _kill(self) -> int | None:
        if self._leads_group and self.process.poll() is None:  # else its number may be that of another group
            os.killpg(self.pid, signal.SIGKILL)
        return super()._kill()


def _file_of(content: bytes) -> BinaryIO:
    """A file to read, which no longer has a name. Unlike a pipe it ends also if a fork of this process holds it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return open(file.name, "rb")


def supervised(
    command: Sequence[str], environment: dict[str, str | None], limits: dict[str, float] | None = None, **options: Any
) -> Program:
    """A program that ends with all its processes; `verl.utils.supervisor.supervise` explains its limits and report.

    Args:
        environment: variables added to those of this process; None takes one away.
        limits: seconds, memory_bytes, processes; None for a server.
        options: of `Program`.
    """
    script = [sys.executable, "-I", "-S", supervisor.__file__]
    given = json.dumps({"owner": os.getpid(), "limits": limits})
    variables = os.environ | dict.fromkeys(_RANKS) | environment
    env = {name: value for name, value in variables.items() if value is not None}
    return Program(script, [given, *command], env=env, start_new_session=True, **options)
