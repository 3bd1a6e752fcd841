"""Ends the Ray session that a killed driver leaves: `python session_guard.py OWNER_PID FOLDER`.

The owner holds the other end of standard input, and writes a byte there when it has ended its session itself. If the
input closes without that byte (the owner was killed), every descendant of the owner gets a moment to end, then SIGKILL,
and the session's folder is deleted. Ray's own reaper ends the raylet, but its agents may wait half a minute for a GCS
that is gone.
"""

import os
import select
import shutil
import sys
import time

import psutil

LOOK_EVERY_S = 2.0  # processes that lose their parent are known from the last look
GRACE_S = 3.0


def below(processes: list[psutil.Process]) -> set[psutil.Process]:
    """All descendants of the processes, except this one."""
    descendants: set[psutil.Process] = set()
    for process in processes:
        try:
            descendants |= set(process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return descendants - {psutil.Process()}


def main() -> int:
    owner, folder = psutil.Process(int(sys.argv[1])), sys.argv[2]
    known = below([owner])
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_EVERY_S)
        if readable:
            break
        known = {p for p in known if p.is_running()} | below([owner])
    if os.read(sys.stdin.fileno(), 1):
        return 0
    known |= below([owner, *known])
    time.sleep(GRACE_S)
    known |= below(list(known))
    for process in known:
        try:
            process.kill()  # psutil compares start times: never a later process with the same number
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(known, timeout=2.0)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
