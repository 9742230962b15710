"""Ends a pause inside vLLM's engine core when its pause lease is over.

A sidecar that dies or stops during a pause leaves its engine paused. Before the pause, the sidecar
has written to the core's lease page who paused the engine, and until when
(:mod:`sidecar._shared_pages.pause_lease`). A thread of the core's process reads that page. When the
lease is over, the core acts on its own thread, between two turns of its loop:

===================== ==================================================================
state of the core     action
===================== ==================================================================
not paused            none; but if a paused peer waits for this one, the core pauses, too, so
                      that all can resume
weights incomplete    quarantined: stays paused; requests end with the tokens they have
update has begun      restores the old weights
memory is asleep      wakes
weights complete      resumes if it has no peers; otherwise it votes, see below
===================== ==================================================================

The ranks of a DP group decide together, by votes in the store of their process group, which works
across hosts (:mod:`sidecar._lease_agreement`). Their sidecars only renew the lease.

The cores behind one client (vLLM's internal load balancer), whose one sidecar names them all in
the lease, decide together by reading each other's pages. A core whose weights are complete *votes*:
from then on its lease is void, and it loads nothing that the sidecar still sends. When every core
has voted, or is being resumed by the sidecar, each core resumes by itself. If one has incomplete
weights, or serves another version, the core is quarantined. While another core's lease is in force,
or its page can't be read, the core waits, and logs for which one. A live sidecar ends such a pause,
and that of a lone engine, itself when the lease is over; the core gives it ``GRACE_S`` seconds.

Functions with a parameter ``original`` wrap the method of their name of vLLM's ``EngineCoreProc``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bus import operations as ops
from bus._vllm.seams import Has, Ref, Seam, Takes
from bus.messages import NackCode
from sidecar._lease_agreement import ALL_WHOLE, INCOMPLETE, LeaseAgreement, RankLease
from sidecar._shared_pages.core_status import LOCALLY_PAUSED, CoreStatusReader
from sidecar._shared_pages.pause_lease import (
    OutcomeState,
    PauseLease,
    PauseLeasePage,
    is_alive,
    lease_path,
)
from sidecar._shared_pages.two_slot_page import NoPage
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.core.adapters import perform
from sidecar._vllm.plugin.core.status import PerProcess, beat, is_paused, make_folder, page_path
from sidecar._vllm.plugin.vllm_names import CORE_MODULE, PLAIN_CORE, REQUEST_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("vllm.wavebus")

PAUSE_LEASE: Final = Seam(
    "pause lease",
    ("pause_lease", "lockstep_pause_lease"),
    (
        Takes(f"{PLAIN_CORE}._send_abort_outputs", "self, aborted_reqs"),
        Takes(f"{PLAIN_CORE}.pause_scheduler", "self, mode, clear_cache"),
        Takes(f"{PLAIN_CORE}.resume_scheduler", "self"),
        Takes(f"{PLAIN_CORE}.has_work", "self"),
        Has(REQUEST_TYPES, "WAKEUP"),
        Has(f"{CORE_MODULE}:RequestStatus", "FINISHED_ABORTED"),
    ),
    process="core",
    needs=("core status",),
    sets=(
        (PLAIN_CORE, "wavebus_wakeup", Ref(f"{REQUEST_TYPES}.WAKEUP")),
        (PLAIN_CORE, "wavebus_aborted", Ref(f"{CORE_MODULE}:RequestStatus.FINISHED_ABORTED")),
    ),
)
PERIOD_S: Final = 0.2
GRACE_S: Final = 5.0
_DUE: Final = "wavebus: look at the lease page"


Peers: TypeAlias = dict[str, Path]  # lease pages of the other cores, by a name for messages


class LockstepRank:
    """Implements :class:`sidecar._lease_agreement.RankCore` for a lockstep core of vLLM."""

    def __init__(self, core: Any, guard: LeaseGuard) -> None:
        self._core = core
        self.prepare = guard.restore
        self.quarantine = guard.end_requests

    @property
    def resumes(self) -> int:
        return int(self._core.wavebus_resumes)

    @property
    def is_resuming(self) -> bool:
        return bool(self._core.wavebus_resuming)

    @property
    def is_paused(self) -> bool:
        return is_paused(self._core)

    @property
    def is_complete(self) -> bool:
        return _is_complete(self._core)

    def pause(self) -> None:
        _log.warning("wavebus: a peer rank is paused alone; completing its pause")
        self._core.pause_scheduler("keep", False)

    def resume(self) -> None:
        self._core.resume_scheduler()


class LeaseGuard:
    """Watches one engine core's lease page, and ends a pause whose lease is over.

    Args:
        core: vLLM's engine core, in whose process this object lives.

    Attributes:
        page: the core's lease page, which this class creates.
    """

    def __init__(self, core: Any) -> None:
        path = lease_path(page_path(os.getpid()))
        make_folder(path.parent)
        self.page = PauseLeasePage.make(path)
        Finalize(self, functools.partial(self.page.path.unlink, missing_ok=True), exitpriority=0)
        self._core = core
        self._prepared = 0  # serial of the lease whose update was undone
        self._said = ""
        self._warned = ""
        self._asked = False  # the core is about to check the lease
        self.rank: RankLease | None = None
        size = int(getattr(core, "dp_size", 1))
        if size > 1:
            votes = LeaseAgreement(int(core.dp_rank), size, core.dp_store)
            self.rank = RankLease(LockstepRank(core, self), self.page, votes, self._say)

    def run(self) -> None:
        """Checks the lease page until the process ends; runs in a thread of its own.

        When a lease is over, the method wakes the core, which then calls :meth:`look` on its own
        thread. It also writes to the core's status page that the process runs.
        """
        while True:
            time.sleep(PERIOD_S)
            with self._warns():
                beat()
                if self._is_due() and not self._asked:
                    self._asked = True
                    self._core.input_queue.put_nowait((self._core.wavebus_wakeup, _DUE))

    def run_exchange(self) -> None:
        """Exchanges votes until the process ends; in its own thread, since a store may block."""
        assert self.rank is not None
        while True:
            time.sleep(PERIOD_S)
            with self._warns():
                self.rank.exchange()

    def _is_due(self) -> bool:
        if self.rank is not None:
            return self.rank.is_due()
        lease = self.page.lease()
        return lease is not None and _has_expired(lease)

    @contextlib.contextmanager
    def _warns(self) -> Iterator[None]:
        """Logs a block's exception, unless it repeats the last one; never raises it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may go well
            if repr(error) != self._warned:
                self._warned = repr(error)
                _log.warning("wavebus: checking the lease page failed, and is repeated: %r", error)

    def void_reason(self) -> str:
        """Returns why the sidecar must not change weights in this pause; empty if that is allowed.

        Changes are forbidden once the core has acted on the end of the pause's lease.
        """
        if self.rank is not None and self.rank.is_void:
            return "the pause's lease was over, and the ranks decide how the pause ends"
        lease, end = self.page.lease(), self.page.outcome()
        if lease is None or end is None or end.serial != lease.serial:
            return ""
        return f"the pause's lease was over, and the engine is {end.state}: {end.reason}"

    def look(self) -> None:
        """Calls :meth:`check_lease`, and logs its exceptions. Runs on the core's thread."""
        self._asked = False
        with self._warns():
            self.check_lease()

    def check_lease(self) -> None:
        """Ends the pause by the module's table, if the pause's lease is over."""
        if self.rank is not None:
            self.rank.look()
            return
        lease = self.page.lease()
        if lease is None or not _has_expired(lease):
            return
        end = self.page.outcome()
        if end is not None and end.serial == lease.serial and end.state != "waiting":
            return
        peers = self._deciding_peers(lease)
        if not is_paused(self._core):
            if not lease.resuming:
                self._complete_peers(peers)
            return
        if not _is_complete(self._core) and (peers or is_alive(lease.writer_pid)):
            return  # the sidecar's call is pending
        self._decide(lease, peers)

    def _decide(self, lease: PauseLease, peers: Peers) -> None:
        if lease.partial:
            self._quarantine(lease, f"incomplete weights: {', '.join(lease.partial)}")
            return
        if self._prepared != lease.serial:
            try:
                self.restore(lease)
            except Exception as error:  # noqa: BLE001 - any failure leaves mixed weights
                _log.exception("wavebus: an update could not be undone")
                self._quarantine(lease, f"an update could not be undone: {error}")
                return
            self._prepared = lease.serial
        if peers:
            self.page.write_outcome(lease.serial, "waiting", self._said)
            state, reason = self._verdict(lease, peers)
        else:
            state, reason = "resumed", "no sidecar renewed the lease"
        if state == "quarantined":
            self._quarantine(lease, reason)
            return
        self._write_outcome(lease, state, reason)
        if state == "resumed":
            self._core.resume_scheduler()

    def restore(self, lease: PauseLease) -> None:
        """Undoes the changes of an unfinished update, and wakes memory that is asleep."""
        if lease.begun == "adapter":
            perform(self._core, operations.UndoAdapter(settled=True))
        elif lease.begun:
            perform(self._core, ops.Restore(lease.begun))
        if lease.asleep:
            self._core.collective_rpc("wake_up", kwargs={"tags": None})
            publish = getattr(self._core, "wavebus_publish_caches", None)
            if publish is not None:
                publish()  # peers of a KV connector would keep using the old caches

    def end_requests(self) -> None:
        """Ends all requests with the tokens they have."""
        core = self._core
        ended = core.scheduler.finish_requests(None, core.wavebus_aborted)
        core._send_abort_outputs(ended)  # noqa: SLF001 - as vLLM's own pause does

    def _quarantine(self, lease: PauseLease, reason: str) -> None:
        self.end_requests()
        self._write_outcome(lease, "quarantined", reason)

    def _write_outcome(self, lease: PauseLease, state: OutcomeState, reason: str) -> None:
        self.page.write_outcome(lease.serial, state, reason)
        if reason != self._said:
            self._said = reason
            self._say(lease.pause_id, state, reason)

    @staticmethod
    def _say(pause_id: str, state: OutcomeState, reason: str) -> None:
        level = logging.INFO if state == "resumed" else logging.WARNING
        text = "wavebus: the lease of pause %s is over, and the engine is %s: %s"
        _log.log(level, text, pause_id, state, reason)

    # -- the other cores behind one client ---------------------------------------------------

    def _deciding_peers(self, lease: PauseLease) -> Peers:
        """Returns the lease pages of the other cores that decide."""
        own = self.page.path
        return {
            f"core {pid}": own.with_stem(str(pid)) for pid in lease.cores if str(pid) != own.stem
        }

    def _verdict(self, mine: PauseLease, peers: Peers) -> tuple[OutcomeState, str]:
        """Returns the decision of all cores, and its reason; this core has voted already."""
        waits = ""
        for name, peer in peers.items():
            try:
                state, reason = self._vote_of(mine, peer)
            except NoPage as error:
                state, reason = "waiting", str(error)
            if state == "quarantined":
                return state, f"{name}: {reason}"
            if state == "waiting":
                waits = waits or f"{name}: {reason}"
        if waits:
            return "waiting", waits
        return "resumed", ALL_WHOLE

    def _vote_of(self, mine: PauseLease, peer: Path) -> tuple[OutcomeState, str]:
        """Returns one peer core's vote, according to its page.

        Raises:
            NoPage: there is no such page on this host.
        """
        with PauseLeasePage.open(peer) as page:
            lease, end = page.lease(), page.outcome()
        if lease is None:
            if _stays_paused(peer):
                return "waiting", "it is paused, and its lease page has no lease"
            return "resumed", ""
        made = end.state if end is not None and end.serial == lease.serial else ""
        if lease.partial or made == "quarantined":
            return "quarantined", INCOMPLETE
        if lease.version != mine.version:
            return (
                "quarantined",
                f"it serves version {lease.version}, and this core serves {mine.version}",
            )
        if made or lease.resuming:
            return "resumed", ""
        return "waiting", "its sidecar keeps it paused"

    def _complete_peers(self, peers: Peers) -> None:
        """Pauses this core if a peer is paused alone, so that both can agree."""
        for name, peer in peers.items():
            try:
                paused = _stays_paused(peer)
            except NoPage:
                continue
            if paused:
                _log.warning("wavebus: %s is paused alone; completing its pause", name)
                self._core.pause_scheduler("keep", False)
                return


def _start(core: Any) -> LeaseGuard | None:
    if hasattr(core, "current_wave") and not (
        hasattr(core, "wavebus_resumes") and hasattr(core, "dp_store")
    ):
        return None  # ranks in lockstep vote in their store, and must show when they resume
    guard = LeaseGuard(core)
    threading.Thread(target=guard.run, name="wavebus_lease_guard", daemon=True).start()
    if guard.rank is not None:
        name = "wavebus_lease_votes"
        threading.Thread(target=guard.run_exchange, name=name, daemon=True).start()
    return guard


_watches = PerProcess(_start, "this core can't end a pause whose sidecar has died")


@PAUSE_LEASE.wrap(f"{PLAIN_CORE}._process_input_queue", "self")
def process_input_queue(original: Callable[..., Any], core: Any) -> None:
    """Starts the lease guard at the first turn of the core's loop."""
    _watches.of(core)
    original(core)


@PAUSE_LEASE.wrap(f"{PLAIN_CORE}._handle_client_request", "self, request_type, request")
def handle_client_request(
    original: Callable[..., Any], core: Any, request_type: Any, request: Any
) -> None:
    """Checks the lease when the guard's wake-up arrives in the core's queue.

    ``original`` gets every other entry of the queue.
    """
    if request is not _DUE:
        original(core, request_type, request)
        return
    watch = _watches.of(core)
    if watch is not None:
        watch.look()


@PAUSE_LEASE.wrap(f"{PLAIN_CORE}.collective_rpc", "self, method, timeout, args, kwargs")
def collective_rpc(
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Refuses operations that change weights once the core has acted on the lease's end."""
    watch = _watches.of(core) if method == operations.PERFORM else None
    if watch is not None and kwargs and (void := watch.void_reason()):
        _refuse_updates(void, kwargs["operation"])
    return original(core, method, timeout, args, kwargs)


def _refuse_updates(void: str, operation: str) -> None:
    from sidecar._vllm.plugin.agreement import WorkerRefusal  # noqa: PLC0415 - needs torch

    if operations.decode(operation).changes_weights:
        raise WorkerRefusal(operations.WorkerFailure(NackCode.WRONG_STATE, void).to_text())


def _stays_paused(peer: Path) -> bool:
    """Returns whether another core is paused or pausing, and is not resuming.

    Raises:
        NoPage: its core has no status page.
    """
    view = CoreStatusReader(peer.with_suffix(".page")).read()
    return bool(view.flags & LOCALLY_PAUSED) and view.phase != "barrier"


def _is_complete(core: Any) -> bool:
    """Returns whether the core is idle in its pause; in lockstep, whether all ranks agreed."""
    return not core.has_work() and bool(getattr(core, "ignore_start_dp_wave", True))


def _has_expired(lease: PauseLease) -> bool:
    late_s = (time.monotonic_ns() - lease.until_ns) / 1e9
    return late_s > (GRACE_S if is_alive(lease.writer_pid) else 0.0)
