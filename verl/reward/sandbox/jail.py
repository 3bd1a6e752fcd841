"""Starts one Python program without privileges, kills it at its time limit, reports how it ended.

Run as a script by `verl.reward.sandbox.run`, with the standard library alone: `python -I -S jail.py CONTROL_FD`.
CONTROL_FD is a socket: a request comes in (4 bytes of length, then JSON), and a report goes out in the same form; when
the other end sends more or closes, the program is killed. Descriptors 0, 1, 2 are the program's.

Layers: user, pid, mount, network, ipc, uts and cgroup namespaces; a root of read-only libraries and one small tmpfs;
rlimits; no new privileges; Landlock; a filter that allows known system calls only (no fork, no network).
The program is process 1 of its pid namespace, so that nothing outlives it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time

NOBODY = 65534
INSIDE_ID = 1000
NEW_USER_AND_PID = 0x10000000 | 0x20000000
NEW_OTHERS = 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000  # mount, net, ipc, uts, cgroup
MS_RDONLY_ATTR, MS_NOSUID_ATTR, MS_NODEV_ATTR = 1, 2, 4
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, os.O_CLOEXEC, 4
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 428, 429, 442, 155
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
MACHINE = "x86_64"  # the numbers above and below are this machine's
# What a Python program with threads needs: (first, last) numbers. Memory, files, clocks, signals to itself, threads,
# waiting on descriptors, pairs of connected sockets (asyncio), reading of ids and limits, another Python by execve.
# Not setsockopt, whose buffers and filters, nor timer_create, whose timers lie in kernel memory that no limit counts.
ALLOWED = (
    (0, 28), (32, 40), (44, 48), (51, 53), (55, 55), (59, 63), (72, 91), (95, 100), (102, 102), (104, 104), (107, 108),
    (110, 111), (115, 115), (118, 118), (120, 121), (124, 124), (127, 128), (130, 132), (137, 138), (140, 140),
    (143, 143), (145, 148), (158, 158), (160, 160), (186, 187), (201, 202), (204, 204), (213, 213), (217, 219),
    (221, 221), (228, 235), (247, 247), (257, 258), (262, 271), (273, 274), (280, 287), (289, 293), (295, 296),
    (302, 302), (309, 309), (315, 316), (318, 318), (324, 324), (326, 328), (332, 332), (334, 334), (436, 437),
    (439, 439), (441, 441), (449, 449), (452, 452),
)  # fmt: skip
FIRST_NEW = 424  # libc tries numbers from here on and takes older ones where the kernel does not know them
SYS_CLONE, SYS_PRCTL, CLONE_THREAD, PR_NAMES = 56, 157, 0x00010000, (15, 16)
libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel refused a layer; the message names it."""


def call(what: str, name: str, *args) -> int:
    """A libc function; ints go as longs, so that they serve `syscall` too."""
    full = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = getattr(libc, name)(*full)
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def new_ids() -> None:
    """An id without rights outside, in user and pid namespaces of its own; as root the id becomes nobody's first."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("dumpable", "prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self belongs to root
    uid, gid = os.getuid(), os.getgid()
    call("user namespace", "unshare", NEW_USER_AND_PID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE_ID} {uid} 1"), ("gid_map", f"{INSIDE_ID} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def clone_trees(paths: list[str]) -> list[tuple[str, str | int]]:
    """(path, target of the link) or (path, descriptor of a detached copy of the mount) of each path that exists."""
    trees: list[tuple[str, str | int]] = []
    for path in filter(os.path.lexists, paths):
        if os.path.islink(path):
            trees.append((path, os.readlink(path)))
        else:
            flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
            trees.append((path, call(f"copy of {path}", "syscall", SYS_OPEN_TREE, AT_FDCWD, path.encode(), flags)))
    return trees


def new_root(trees: list[tuple[str, str | int]], masked: list[str], disk_mb: int) -> None:
    """A root that holds the trees, read-only, /dev/null, and an empty writable /tmp without executable files.

    The folders `masked` in the trees are empty.
    """
    base = next(d for d in ("/mnt", "/srv", "/opt", "/tmp") if os.path.isdir(d))
    quiet = MS_NOSUID | MS_NODEV
    call("tmpfs", "mount", b"tmpfs", base.encode(), b"tmpfs", quiet, b"size=1m,nr_inodes=512,mode=755")
    for path, tree in trees:
        show(base + path, tree)
    for path in masked:
        call(f"mask {path}", "mount", b"tmpfs", (base + path).encode(), b"tmpfs", quiet, b"nr_inodes=1,mode=755")
    os.mkdir(f"{base}/tmp")
    os.mkdir(f"{base}/dev")
    null = f"{base}/dev/null"
    os.close(os.open(null, os.O_CREAT))
    attributes = struct.pack("QQQQ", MS_RDONLY_ATTR | MS_NOSUID_ATTR | MS_NODEV_ATTR, 0, 0, 0)
    call("read-only root", "syscall", SYS_MOUNT_SETATTR, AT_FDCWD, base.encode(), AT_RECURSIVE, attributes, 32)
    call("device", "mount", b"/dev/null", null.encode(), None, MS_BIND, None)
    size = f"size={disk_mb}m,nr_inodes=1024,mode=700"
    call("tmpfs", "mount", b"tmpfs", f"{base}/tmp".encode(), b"tmpfs", quiet | MS_NOEXEC, size.encode())
    os.chdir(base)
    call("new root", "syscall", SYS_PIVOT_ROOT, b".", b".")
    call("old root", "umount2", b".", MNT_DETACH)
    os.chdir("/tmp")


def show(target: str, tree: str | int) -> None:
    """Put a tree at a path of the new root, or make a link."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if isinstance(tree, str):
        os.symlink(tree, target)
        return
    if os.fstat(tree).st_mode & 0o170000 == 0o040000:
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT))
    call(f"mount {target}", "syscall", SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)


def limit(request: dict) -> None:
    """Resource limits, which the program cannot raise."""
    megabyte = 1 << 20
    limits = {
        resource.RLIMIT_AS: request["memory_mb"] * megabyte, resource.RLIMIT_FSIZE: request["disk_mb"] * megabyte,
        resource.RLIMIT_CPU: int(request["seconds"]) + 1, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
    }  # fmt: skip
    if not request["unconfined"]:  # counted in the user namespace; without one it would count all of the user's
        limits[resource.RLIMIT_NPROC] = request["threads"]
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))


def landlock() -> None:
    """Read and execute everywhere, write in /tmp alone; no TCP, no signals or abstract sockets to the outside."""
    abi = call("Landlock", "syscall", SYS_LANDLOCK_CREATE, None, 0, 1)
    known = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1  # rights to files; later versions have more of them
    # TCP exists since version 4, scopes (signals and sockets) since 6: earlier ones take a shorter structure.
    attributes = struct.pack("QQQ", known, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = call("Landlock", "syscall", SYS_LANDLOCK_CREATE, attributes, len(attributes), 0)
    execute, write, read, list_folder = 1 << 0, 1 << 1, 1 << 2, 1 << 3
    change = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14  # remove and make folders and files, move, truncate
    look = execute | read | list_folder
    for path, allowed in (("/", look), ("/tmp", look | write | change), ("/dev/null", read | write)):
        handle = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed & known, handle)
        call(f"Landlock {path}", "syscall", SYS_LANDLOCK_ADD, rules, 1, rule, 0)
    call("Landlock", "syscall", SYS_LANDLOCK_RESTRICT, rules, 0)


def filter_calls() -> None:
    """Forbid all calls but those of ALLOWED, new threads and the name of a thread."""
    load, equal, at_least, above, any_bit, leave = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    not_permitted, not_known = 0x00050000 | 1, 0x00050000 | 38
    # (operation, lines to skip if true, if false, operand); loaded are 0 the call's number, 4 the architecture, 16 the
    # call's first argument.
    code = [
        (load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (leave, 0, 0, kill),  # another architecture
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (leave, 0, 0, kill),  # the x32 numbers
        (equal, 0, 4, SYS_CLONE), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD), (leave, 0, 0, not_permitted),
        (leave, 0, 0, allow),
        (equal, 0, 5, SYS_PRCTL), (load, 0, 0, 16), (equal, 2, 0, PR_NAMES[0]), (equal, 1, 0, PR_NAMES[1]),
        (leave, 0, 0, not_permitted), (leave, 0, 0, allow),
    ]  # fmt: skip
    for first, last in ALLOWED:
        code += [(at_least, 0, 2, first), (above, 1, 0, last), (leave, 0, 0, allow)]
    code += [(at_least, 0, 1, FIRST_NEW), (leave, 0, 0, not_known), (leave, 0, 0, not_permitted)]
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    keep = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(keep))
    call("system call filter", "prctl", PR_SET_SECCOMP, 2, program)


def start(request: dict, trees: list[tuple[str, str | int]], failure: int) -> None:
    """The child: becomes the program, or writes the reason why not to `failure`."""
    try:
        os.setsid()
        if request["unconfined"]:
            os.chdir(request["folder"])
        else:
            call("other namespaces", "unshare", NEW_OTHERS)
            call("private mounts", "mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
            new_root(trees or clone_trees(request["visible"]), request["masked"], request["disk_mb"])
        with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["program"])
        call("no new privileges", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("death signal", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        limit(request)
        if not request["unconfined"]:
            landlock()
            filter_calls()
        os.execve(request["python"], [request["python"], "-I", "-B", "main.py"], {})
    except Exception as error:
        os.write(failure, str(error if isinstance(error, Refused) else repr(error)).encode())
    finally:
        os._exit(127)


def supervise(pid: int, control: int, seconds: float) -> dict:
    """Wait for the program, kill it at its time or when the other end of the control socket sends or closes."""
    began = time.monotonic()
    watched = select.poll()
    ended = os.pidfd_open(pid)
    watched.register(ended, select.POLLIN)
    watched.register(control, select.POLLIN | select.POLLHUP)
    seen = [handle for handle, _ in watched.poll(seconds * 1000)]
    if ended not in seen:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended
    _, status = os.waitpid(pid, 0)
    return {"exit": os.waitstatus_to_exitcode(status), "timeout": not seen, "seconds": time.monotonic() - began}


def serve(control: int) -> dict:
    """One request, answered by a report: how the program ended, or {"refused": why it was not started}."""
    received = b""
    while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
        part = os.read(control, 1 << 20)
        if not part:
            raise Refused("the request is incomplete")
        received += part
    request = json.loads(received[4:])
    trees = []
    if not request["unconfined"]:
        if os.uname().machine != MACHINE:
            raise Refused(f"system call filter: written for {MACHINE}, this is {os.uname().machine}")
        if os.geteuid() == 0:  # the user nobody may not have access
            trees = clone_trees(request["visible"])
        new_ids()
    reasons, failure = os.pipe()
    pid = os.fork()
    if pid == 0:
        start(request, trees, failure)
    os.close(failure)
    for handle in (0, 1, 2):
        os.close(handle)  # only the program keeps them open, until it ends
    if reason := os.read(reasons, 4096):
        os.waitpid(pid, 0)
        raise Refused(reason.decode())
    return supervise(pid, control, request["seconds"])


if __name__ == "__main__":
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)  # the program must not write its own report
    try:
        report = serve(channel)
    except (Refused, OSError) as problem:
        report = {"refused": str(problem)}
    try:
        message = json.dumps(report).encode()
        os.write(channel, len(message).to_bytes(4, "big") + message)
    except OSError:
        pass  # the caller is gone
