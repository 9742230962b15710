"""Writes a vLLM engine core's status page, from inside the core.

The page says whether the core steps, is idle, or waits for other ranks. The plugin wraps a few
methods of ``EngineCoreProc`` and ``DPEngineCoreProc``, all called in the core's main thread. The
first pass of the core's loop creates the page. Its file is named after the core's pid, in the
folder :data:`environment.CORE_PAGES`, or else in a folder on tmpfs for each user.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from bus._vllm.seams import Seam, Takes
from sidecar._shared_pages.core_status import (
    GLOBALLY_PAUSED,
    LOCALLY_PAUSED,
    STEPPING,
    CoreStatusPage,
)
from sidecar._shared_pages.pause_lease import stat_of
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.vllm_names import LOCKSTEP_CORE, PLAIN_CORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import CorePhase

T = TypeVar("T")

_log = logging.getLogger("vllm.wavebus")
_SUFFIX: Final = ".page"
_SUFFIXES: Final = (_SUFFIX, ".hold")


def pages_folder() -> Path:
    """Returns the folder in which the cores of this environment keep their pages.

    A name that another user has taken is skipped: anybody may make folders there.
    """
    chosen = os.environ.get(environment.CORE_PAGES)
    if chosen:
        return Path(chosen)
    own = environment.memory_folder() / f"wavebus-cores-{os.getuid()}"
    folders = [own, *(own.with_name(f"{own.name}-{number}") for number in range(1, 100))]
    return next((folder for folder in folders if _is_ours_or_missing(folder)), own)


def _is_ours_or_missing(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def page_path(pid: int) -> Path:
    """Returns the path of the status page of the core with this pid."""
    return pages_folder() / f"{pid}{_SUFFIX}"


def make_folder(folder: Path) -> None:
    """Creates the folder of the pages, readable for its owner alone, if it is missing.

    Raises:
        PermissionError: the folder belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder} belongs to another user: remove it, or set {environment.CORE_PAGES} to "
            "another folder"
        )


def is_paused(core: Any) -> bool:
    """Returns whether an engine core is paused, or about to be."""
    return int(core.scheduler.pause_state) != 0


def siblings(pid: int) -> tuple[int, ...]:
    """Returns the pids of all cores that have the same parent process as this core.

    These are the cores behind one client, this one included.
    """
    parent = _parent_of(pid)
    pids = (int(path.stem) for path in pages_folder().glob(f"*{_SUFFIX}") if path.stem.isdigit())
    return tuple(sorted(each for each in pids if parent and _parent_of(each) == parent))


def _parent_of(pid: int) -> int:
    """Returns the pid of the parent; 0 if the process is gone."""
    stat = stat_of(pid)
    return int(stat[1]) if stat else 0


class CoreStatusWriter:
    """Creates and writes the status page of the engine core in this process.

    Args:
        core: vLLM's engine core.

    Attributes:
        page: the page.
        steps: how many steps the core has run.
        enter: writes which phase begins now: :meth:`CoreStatusPage.enter`.
    """

    def __init__(self, core: Any) -> None:
        path = page_path(os.getpid())
        make_folder(path.parent)
        _remove_stale(path.parent)
        self.page = CoreStatusPage(path, rank=core.engine_index)
        # The cores' processes skip atexit, but still run this.
        Finalize(self, self.page.close, exitpriority=0)
        self.steps = 0
        self.enter = self.page.enter
        self.count(core)

    def show(self, core: Any, phase: CorePhase) -> None:
        """Reads the core's counts and flags, and writes them to the page with the phase."""
        self.count(core)
        self.enter(phase)

    def count(self, core: Any) -> None:
        """Reads the core's counts and flags, which the next :attr:`enter` writes to the page."""
        paused = is_paused(core)
        agreed = getattr(core, "ignore_start_dp_wave", paused)
        stepping = getattr(core, "engines_running", False)
        running, waiting = core.scheduler.get_request_counts()
        self.page.count(
            step=self.steps,
            wave=getattr(core, "current_wave", 0),
            flags=LOCALLY_PAUSED * paused | GLOBALLY_PAUSED * agreed | STEPPING * stepping,
            waiting=waiting,
            running=running,
            untagged=getattr(core, "wavebus_untagged", 0),
        )


class PerProcess(Generic[T]):
    """Creates one object for this process's engine core, when it is first needed.

    vLLM forks its cores' processes, so an object of the parent process must not be used.

    Args:
        make: creates the object for a core; may return None.
        failure: the warning to log if ``make`` raises; the core then works without the object.
    """

    def __init__(self, make: Callable[[Any], T | None], failure: str) -> None:
        self._make = make
        self._failure = failure
        self._made: T | None = None
        self._pid = 0

    def of(self, core: Any) -> T | None:
        """Returns this process's object, which the first call creates; None without one."""
        if self._pid != os.getpid():
            self._pid, self._made = os.getpid(), None
            try:
                self._made = self._make(core)
            except Exception as error:  # noqa: BLE001 - it is logged
                _log.warning("wavebus: %s: %s", self._failure, error)
        return self._made

    @property
    def current(self) -> T | None:
        """This process's object; None if :meth:`of` has not created it. Safe in any thread."""
        return self._made if self._pid == os.getpid() else None


_watches = PerProcess(CoreStatusWriter, "this engine core has no status page")

STATUS: Final = Seam(
    "core status",
    ("core_status", "lockstep_core_status", "pause_lease", "lockstep_pause_lease"),
    (Takes(f"{PLAIN_CORE}.has_work", "self"),),
    process="core",
)
LOCKSTEP_STATUS: Final = Seam(
    "lockstep core status",
    ("lockstep_core_status", "lockstep_pause_lease"),
    process="core",
    needs=("core status",),
    sets=((LOCKSTEP_CORE, "wavebus_resumes", 0), (LOCKSTEP_CORE, "wavebus_resuming", False)),
)


def beat() -> None:
    """Writes to this process's status page that the process runs. Safe in any thread."""
    if _watches.current is not None:
        _watches.current.page.beat()


def _watched(around: Callable[..., Any]) -> Callable[..., Any]:
    """Passes the core's status writer to a wrapper; without a writer, calls the original."""

    @functools.wraps(around)
    def with_watch(original: Callable[..., Any], core: Any, *args: Any) -> Any:
        watch = _watches.of(core)
        if watch is None:
            return original(core, *args)
        return around(watch, original, core, *args)

    return with_watch


@STATUS.wrap(f"{PLAIN_CORE}._process_input_queue", "self")
@_watched
def input_queue(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> None:
    """Shows the core as idle while it waits for requests."""
    watch.show(core, "work" if core.has_work() else "idle")
    original(core)
    watch.show(core, "work")


@STATUS.wrap(f"{PLAIN_CORE}._handle_client_request", "self, request_type, request")
@_watched
def client_request(
    watch: CoreStatusWriter,
    original: Callable[..., Any],
    core: Any,
    request_type: Any,
    request: Any,
) -> None:
    """Shows the core as working during a request or a worker call; records prompt lengths."""
    watch.enter("work")
    if request and getattr(request_type, "name", "") == "ADD":
        watch.page.limit.on_prompt(getattr(request[0], "num_prompt_tokens", 0))
    original(core, request_type, request)
    watch.show(core, "work" if core.has_work() else "idle")


@STATUS.wrap(f"{PLAIN_CORE}.step", "self")
@STATUS.wrap(f"{PLAIN_CORE}.step_with_batch_queue", "self")
@_watched
def outputs_made(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Updates the counts before a step's outputs leave, so that no ended request is counted."""
    outputs = original(core)
    watch.show(core, "work")
    return outputs


@STATUS.wrap(f"{PLAIN_CORE}._send_abort_outputs_to_client", "self, req_ids, client_index")
@_watched
def abort_outputs(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, *request: Any
) -> None:
    """Updates the counts before the outputs of aborted requests leave."""
    watch.show(core, "work")
    original(core, *request)


@STATUS.wrap(f"{PLAIN_CORE}._process_engine_step", "self")
@_watched
def engine_step(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Shows the core as in a step, and counts the step.

    In lockstep, :func:`agreement` counts instead.
    """
    watch.enter("step")
    executed = original(core)
    if not hasattr(core, "step_counter"):  # in lockstep, agreement() counts
        watch.steps += bool(executed)
    watch.enter("work")
    return executed


@LOCKSTEP_STATUS.wrap(f"{LOCKSTEP_CORE}.execute_dummy_batch", "self")
@_watched
def dummy_batch(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Shows the rank as in a dummy step, which runs no request."""
    watch.enter("dummy")
    result = original(core)
    watch.enter("work")
    return result


@LOCKSTEP_STATUS.wrap(f"{LOCKSTEP_CORE}._has_global_unfinished_reqs", "self, local_unfinished")
@_watched
def agreement(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, local_unfinished: bool
) -> Any:
    """Shows the rank as waiting for others in an all-reduce, and counts its step."""
    watch.steps += 1
    watch.show(core, "sync")
    result = original(core, local_unfinished)
    watch.enter("work")
    return result


@LOCKSTEP_STATUS.wrap(f"{LOCKSTEP_CORE}.resume_scheduler", "self")
@_watched
def barrier(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Shows the rank as in a barrier while its resume waits for the other ranks."""
    watch.enter("barrier")
    core.wavebus_resuming = True
    try:
        result = original(core)
        core.wavebus_resumes += 1
        return result
    finally:
        core.wavebus_resuming = False
        watch.show(core, "work")


def _remove_stale(folder: Path) -> None:
    """Removes the pages of cores that no longer run."""
    for path in folder.iterdir():
        ours = path.suffix in _SUFFIXES and path.stem.isdigit()
        if ours and not Path(f"/proc/{path.stem}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
