"""The status page inside vLLM's engine core: what it does, written where it does it.

Wraps a few methods of ``EngineCoreProc`` and ``DPEngineCoreProc``; all are called on the
core's one main thread. The page is made by the core's first turn, in a folder of its own
(:data:`environment.CORE_PAGES`, or else one per user on tmpfs), named by its pid.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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

    from bus.messages import CorePhase

_log = logging.getLogger("vllm.wavebus")
_SUFFIX: Final = ".page"
_SUFFIXES: Final = (_SUFFIX, ".hold")


def pages_folder() -> Path:
    """Where the cores of this environment keep their pages."""
    chosen = os.environ.get(environment.CORE_PAGES)
    if chosen:
        return Path(chosen)
    return environment.memory_folder() / f"wavebus-cores-{os.getuid()}"


def page_path(pid: int) -> Path:
    """The page of the core that is this process."""
    return pages_folder() / f"{pid}{_SUFFIX}"


def make_folder(folder: Path) -> None:
    """Make the folder of the pages, if it is not there.

    Raises:
        PermissionError: somebody else has made it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; remove it")


def siblings(pid: int) -> tuple[int, ...]:
    """The cores that the parent of this one has started: those behind one client. With itself."""
    parent = _parent_of(pid)
    pids = (int(path.stem) for path in pages_folder().glob(f"*{_SUFFIX}") if path.stem.isdigit())
    return tuple(sorted(each for each in pids if parent and _parent_of(each) == parent))


def _parent_of(pid: int) -> int:
    """0: it is gone."""
    stat = stat_of(pid)
    return int(stat[1]) if stat else 0


class CoreStatusWriter:
    """What one core writes of itself."""

    def __init__(self, core: Any) -> None:
        path = page_path(os.getpid())
        make_folder(path.parent)
        _remove_stale(path.parent)
        self.page = CoreStatusPage(path, rank=core.engine_index)
        # The cores' processes end without atexit; this they still run.
        Finalize(self, self.page.close, exitpriority=0)
        self.steps = 0

    def count(self, core: Any) -> None:
        """New numbers, for the next :meth:`enter`."""
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

    def enter(self, phase: CorePhase) -> None:
        self.page.enter(phase)


class _StatusWriters:
    """This process's one watch, made when its core first turns; None where that failed."""

    def __init__(self) -> None:
        self._watch: CoreStatusWriter | None = None
        self._tried_in = 0  # the process: forks need their own

    def of(self, core: Any) -> CoreStatusWriter | None:
        if self._tried_in != os.getpid():
            self._tried_in = os.getpid()
            try:
                self._watch = CoreStatusWriter(core)
                self._watch.count(core)
            except Exception as error:  # noqa: BLE001 - the engine runs as well without it
                self._watch = None
                _log.warning("wavebus: no status page of this engine core: %s", error)
        return self._watch

    def beat(self) -> None:
        """This process runs. In any thread, once its core has turned."""
        if self._watch is not None and self._tried_in == os.getpid():
            self._watch.page.beat()


_watches = _StatusWriters()
beat = _watches.beat


def _watched(around: Callable[..., Any]) -> Callable[..., Any]:
    """Give the function the watch of the core that it is around; without one, it is left out."""

    @functools.wraps(around)
    def with_watch(original: Callable[..., Any], core: Any, *args: Any) -> Any:
        watch = _watches.of(core)
        if watch is None:
            return original(core, *args)
        return around(watch, original, core, *args)

    return with_watch


@_watched
def input_queue(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> None:
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
    """Other than steps, this is what takes a core's time: calls on its workers, for one."""
    watch.enter("work")
    original(core, request_type, request)
    watch.count(core)
    watch.enter("work" if core.has_work() else "idle")


@_watched
def outputs_made(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    """Whoever has read a request's last output finds it counted no more."""
    outputs = original(core)
    watch.count(core)
    watch.enter("work")
    return outputs


@_watched
def abort_outputs(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, *request: Any
) -> None:
    watch.count(core)
    watch.enter("work")
    original(core, *request)


@_watched
def engine_step(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    watch.enter("step")
    executed = original(core)
    if not hasattr(core, "step_counter"):  # in lockstep, agreement counts
        watch.steps += bool(executed)
    watch.enter("work")
    return executed


@_watched
def dummy_batch(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    watch.enter("dummy")
    result = original(core)
    watch.enter("work")
    return result


@_watched
def agreement(
    watch: CoreStatusWriter, original: Callable[..., Any], core: Any, local_unfinished: bool
) -> Any:
    watch.steps += 1
    watch.count(core)
    watch.enter("sync")
    result = original(core, local_unfinished)
    watch.enter("work")
    return result


@_watched
def barrier(watch: CoreStatusWriter, original: Callable[..., Any], core: Any) -> Any:
    watch.enter("barrier")
    try:
        return original(core)
    finally:
        watch.count(core)
        watch.enter("work")


def _remove_stale(folder: Path) -> None:
    """Pages whose cores were killed."""
    for path in folder.iterdir():
        ours = path.suffix in _SUFFIXES and path.stem.isdigit()
        if ours and not Path(f"/proc/{path.stem}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
