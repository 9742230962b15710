"""Runs a server for a sidecar, and leaves none of its processes behind.

This is a program, not a module to import::

    python reaper.py PARENT_PID GRACE_S COMMAND...

The reaper runs the command in a new process group, and ends the group's processes:

* The sidecar dies, even by SIGKILL: the kernel signals the reaper (PR_SET_PDEATHSIG), which ends
  the group.
* The reaper gets SIGTERM, SIGINT or SIGHUP: it sends the signal to the group, continues processes
  that are stopped, and sends SIGKILL after the grace period.
* The reaper gets SIGQUIT: it sends SIGKILL to the group.
* The command ends by itself: the reaper kills what is left of its group.
* The reaper is killed: the kernel kills the command, not its children (PR_SET_PDEATHSIG again).

A killed process unlinks no shared memory. So the reaper lets multiprocessing's resource trackers
finish their cleanup. It then unlinks other shared memory that the group had mapped and no other
process has. Without that, each restart of a server would leave some behind.

The exit code is the command's, or 128 + n if signal n ended the command. The program uses only the
standard library and runs by its path, under any Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
SHARED = "/dev/shm/"  # noqa: S108 - where Linux has the names
# Prefixes of the names that multiprocessing, vLLM and torch create. Shared memory of wavebus
# is removed elsewhere.
THEIRS = ("psm_", "sem.mp-", "vllm_dist_", "torch_")
GONE_S = 5.0  # how long killed processes may take to end
# Signals that end the command.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ARGUMENTS = 3


def die_with_parent(signum: int) -> None:
    """Makes the kernel send this process a signal when its parent's thread ends. Linux only."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(arguments: list[str]) -> int:
    """Runs a command under the rules of this module's docstring, and returns the exit code.

    Args:
        arguments: ``PARENT_PID GRACE_S COMMAND...``.
    """
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    # Blocked signals wait until `sigwait` takes them. A wait for a handler would miss a signal that
    # comes while the process is stopped, or just before the wait.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, signal.SIGCHLD))
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # the parent died before the prctl call
    try:
        child = subprocess.Popen(  # noqa: S603 - the user's own command
            command,
            start_new_session=True,
            preexec_fn=lambda: _prepare_child(unblocked),  # noqa: PLW1509 - one thread here
        )
    except OSError as error:
        sys.stderr.write(f"can't start {command[0]}: {error.strerror}\n")
        return 127

    received: int = signal.SIGCHLD
    while received == signal.SIGCHLD and child.poll() is None:
        received = signal.sigwait((*ENDING, signal.SIGCHLD))
    if child.poll() is None and received != signal.SIGQUIT:
        _kill_group(child.pid, received)
        _kill_group(child.pid, signal.SIGCONT)  # a stopped process can't handle the signal
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    _clean_up(child.pid)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _prepare_child(unblocked: set[int | signal.Signals]) -> None:
    """Gives the command its signals, and a SIGKILL when the reaper dies."""
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    die_with_parent(signal.SIGKILL)


def _clean_up(group: int) -> None:
    """Kills the rest of the group, and removes its shared memory that nobody else uses."""
    names = _names(_members(group))
    until = time.monotonic() + GONE_S
    while (left := _members(group)) and time.monotonic() < until:
        for pid in left:
            if not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    _kill_group(group, signal.SIGKILL)
    for name in names - _names(_processes()) if names else ():
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _is_resource_tracker(pid: int) -> bool:
    """Returns whether a process is multiprocessing's resource tracker.

    A tracker unlinks the names of its processes when they have ended, and then ends itself.
    """
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _members(group: int) -> set[int]:
    found = set()
    for pid in _processes():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            state, its_group = fields[0], int(fields[2])
            if its_group == group and state != "Z":
                found.add(pid)
    return found


def _processes() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}


def _names(processes: set[int]) -> set[str]:
    """Returns the names of shared memory that these processes have mapped."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {line.split(maxsplit=5)[5] for line in lines if SHARED in line}
    return {name for name in found if name.removeprefix(SHARED).startswith(THEIRS)}


def _kill_group(group: int, signum: int) -> None:
    # The group is gone, or has only zombies left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


if __name__ == "__main__":
    if len(sys.argv) <= ARGUMENTS:
        sys.exit("usage: python -m sidecar._supervision.reaper PARENT_PID GRACE_S COMMAND...")
    sys.exit(main(sys.argv[1:]))
