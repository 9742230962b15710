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
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sidecar.shared_pages.core_status import (
    GLOBALLY_PAUSED,
    LOCALLY_PAUSED,
    STEPPING,
    CoreStatusPage,
)
from sidecar.shared_pages.pause_lease import stat_of
from sidecar.vllm.plugin import environment

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_log = logging.getLogger("vllm.wavebus")
_SUFFIX: Final = ".page"
_SUFFIXES: Final = (_SUFFIX, ".hold")


def pages_folder() -> Path:
    """Returns the folder of the status pages of all cores with this environment."""
    chosen = os.environ.get(environment.CORE_PAGES)
    if chosen:
        return Path(chosen)
    return environment.memory_folder() / f"wavebus-cores-{os.getuid()}"


def page_path(pid: int) -> Path:
    """Returns the path of the status page of the core with this pid."""
    return pages_folder() / f"{pid}{_SUFFIX}"


def make_folder(folder: Path) -> None:
    """Creates the folder of the pages if it is missing.

    Raises:
        PermissionError: the folder belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it")


def siblings(pid: int) -> tuple[int, ...]:
    """Returns the pids of all cores that this core's parent process started, itself included."""
    parent = _parent_of(pid)
    pids = (int(path.stem) for path in pages_folder().glob(f"*{_SUFFIX}") if path.stem.isdigit())
    return tuple(sorted(each for each in pids if parent and _parent_of(each) == parent))


def _parent_of(pid: int) -> int:
    """Returns the pid of the parent; 0 if the process is gone."""
    stat = stat_of(pid)
    return int(stat[1]) if stat else 0


class CoreStatusWriter:
    """Writes the status page of one core."""

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

    def count(self, core: Any) -> None:
        """Updates the counts, which the next :meth:`enter` publishes."""
        paused = int(core.scheduler.pause_state) != 0
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
    """An object that each process creates at its core's first turn, also after a fork.

    Args:
        make: creates the object for a core; may return None.
        failure: the warning to log if ``make`` raises; the engine works without the object.
    """

    def __init__(self, make: Callable[[Any], T | None], failure: str) -> None:
        self._make = make
        self._failure = failure
        self._made: T | None = None
        self._pid = 0

    def of(self, core: Any) -> T | None:
        """Returns the object of this process, or None."""
        if self._pid != os.getpid():
            self._pid, self._made = os.getpid(), None
            try:
                self._made = self._make(core)
            except Exception as error:  # noqa: BLE001 - it is logged
                _log.warning("wavebus: %s: %s", self._failure, error)
        return self._made

    @property
    def current(self) -> T | None:
        """The object, if this process has created it. Safe in any thread."""
        return self._made if self._pid == os.getpid() else None


_watches = PerProcess(CoreStatusWriter, "no status page of this engine core")


def beat() -> None:
    """Updates the heartbeat of this process's page. Safe in any thread."""
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


@_watched
def input_queue(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> None:
    """Marks the core as idle while it waits for requests."""
    watch.count(core)
    watch.enter("work" if core.has_work() else "idle")
    original(core)
    watch.count(core)
    watch.enter("work")


@_watched
def client_request(
    watch: CoreStatusWriter,
    original: Callable[..., Any],
    core: Any,
    request_type: Any,
    request: Any,
) -> None:
    """Marks the core as working while it handles a request or a worker call."""
    watch.enter("work")
    original(core, request_type, request)
    watch.count(core)
    watch.enter("work" if core.has_work() else "idle")


@_watched
def outputs_made(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Updates the counts before outputs leave, so that no ended request is still counted."""
    outputs = original(core)
    watch.count(core)
    watch.enter("work")
    return outputs


@_watched
def abort_outputs(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, *request: Any
) -> None:
    """Updates the counts before the outputs of aborted requests leave."""
    watch.count(core)
    watch.enter("work")
    original(core, *request)


@_watched
def engine_step(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Marks and counts a step; in lockstep, :func:`agreement` counts instead."""
    watch.enter("step")
    executed = original(core)
    if not hasattr(core, "step_counter"):  # in lockstep, agreement() counts
        watch.steps += bool(executed)
    watch.enter("work")
    return executed


@_watched
def dummy_batch(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Marks a dummy step, which runs no request."""
    watch.enter("dummy")
    result = original(core)
    watch.enter("work")
    return result


@_watched
def agreement(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, local_unfinished: bool
) -> Any:
    """Counts an all-reduce of the DP group, and marks the rank as waiting in it."""
    watch.steps += 1
    watch.count(core)
    watch.enter("sync")
    result = original(core, local_unfinished)
    watch.enter("work")
    return result


@_watched
def barrier(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Marks the rank as waiting for the others in the barrier of a resume."""
    watch.enter("barrier")
    try:
        return original(core)
    finally:
        watch.count(core)
        watch.enter("work")


def _remove_stale(folder: Path) -> None:
    """Removes the pages of cores that no longer run."""
    for path in folder.iterdir():
        ours = path.suffix in _SUFFIXES and path.stem.isdigit()
        if ours and not Path(f"/proc/{path.stem}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
