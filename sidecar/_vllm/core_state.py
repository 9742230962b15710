"""The sidecar's access to the state that vLLM's engine cores publish.

This covers their status pages and lease pages, their ranks, their DP coordinator, and the version
of their weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

import bus.log
from bus._vllm.payloads import native_name
from bus._weight_transfer.registry import receiver_backends
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._shared_pages.core_status import LOCALLY_PAUSED, CoreStatusReader
from sidecar._shared_pages.pause_lease import LeaseOutcome, PauseLeasePage, is_alive, lease_path
from sidecar._shared_pages.two_slot_page import NoPage
from sidecar._vllm.plugin import environment
from sidecar._vllm.plugin.compat import BACKEND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar._shared_pages.core_status import CoreStatusView
    from sidecar._shared_pages.pause_lease import AbandonedPause, OutcomeState, PauseLease
    from sidecar._vllm.plugin.environment import DpCoordinator
    from sidecar._vllm.plugin.worker_rpc import WorkerFacts


class CoreLink:
    """Reads and writes the shared-memory pages of one engine's cores.

    Args:
        wanted: the DP coordinator that the user has chosen, the bus's or vLLM's.
    """

    def __init__(self, wanted: DpCoordinator) -> None:
        self._wanted = wanted
        self._page: CoreStatusReader | None = None
        self._coordinator_pid = 0
        self._lease_pages: tuple[PauseLeasePage, ...] = ()  # one per core, or none at all
        self._pids: tuple[int, ...] = ()  # pids of the cores, if there are several
        self._cores = 0
        self._log = bus.log.logger()

    def open(self, facts: WorkerFacts, dp_size: int, *, cores: int, here: bool = True) -> None:
        """Opens the pages whose paths the plugin reports, and claims the engine.

        Args:
            facts: the plugin's facts about the engine.
            dp_size: how many ranks its DP group has, each with a sidecar.
            cores: how many cores the engine has; several behind an internal load balancer.
            here: True if the engine runs on this machine; otherwise its pages can't be opened.

        Raises:
            EngineError: the DP group should have the bus's coordinator, and has another one. Code
                ``name_taken``: another sidecar drives the engine.
        """
        if self._wanted == "bus":
            _refuse_uncoordinated(facts, dp_size)
        self.close()
        if here:
            self._page = CoreStatusReader(Path(facts.page)) if facts.page else None
            self._coordinator_pid = facts.coordinator_pid
            self._lease_pages = self._open_lease_pages(facts, cores)
        self._cores = cores
        if not all(page.claim() for page in self._lease_pages):
            raise EngineError(
                "another sidecar of this host drives this engine, and an engine has only one: stop "
                "the other sidecar",
                code=NackCode.NAME_TAKEN,
            )

    def close(self) -> None:
        """Closes the lease pages, so that another sidecar may drive the engine."""
        for page in self._lease_pages:
            page.close()
        self._lease_pages = ()

    def _open_lease_pages(self, facts: WorkerFacts, cores: int) -> tuple[PauseLeasePage, ...]:
        """Opens one lease page per core, or none if some can't be opened.

        Without lease pages, no core ends a pause that this sidecar abandons.
        """
        reason = ""
        if self._page is None:
            reason = "the engine's core has no status page"
        elif cores > 1 and len(facts.cores) != cores:
            reason = (
                f"{cores} cores are behind one client, but only {len(facts.cores)} have pages on "
                "this host"
            )
        else:
            own = self._page.path
            self._pids = facts.cores if cores > 1 else ()
            paths = [own.with_stem(str(pid)) for pid in self._pids] or [own]
            try:
                return tuple(PauseLeasePage.open(lease_path(path)) for path in paths)
            except NoPage as error:
                reason = str(error)
        self._log.warning("pause_lease_not_written", reason=reason)
        return ()

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Writes the lease into every core's page, unless a core has already acted on it.

        Several cores behind one client end a pause only together. If one of them has voted for
        that, the lease is not written again.

        Args:
            lease: as in :meth:`sidecar.engine.Engine.write_pause_lease`.

        Returns:
            What the cores have done because the lease was over; None if the lease is in force.
        """
        if lease is not None:
            lease = replace(lease, cores=self._pids)
            end = self._outcome(lease)
            if end is not None:
                return end
        for page in self._lease_pages:
            if lease is not None or page.lease() is not None:
                page.write_lease(lease)
        return None

    def _outcome(self, lease: PauseLease) -> LeaseOutcome | None:
        """Returns the cores' decision if that decision forbids writing ``lease``, else None.

        Several cores may still be deciding on a previous lease, which must not be replaced then.
        """
        held = [(page.lease(), page.outcome()) for page in self._lease_pages]
        ends = [end for now, end in held if now and end and now.serial == end.serial]
        if not ends:
            return None
        states = {end.state for end in ends}
        state: OutcomeState = "waiting"
        if "quarantined" in states:
            state = "quarantined"
        elif states == {"resumed"} and len(ends) == len(held):
            state = "resumed"
        undecided = state == "waiting" and bool(self._pids)
        if not undecided and all(end.serial != lease.serial for end in ends):
            return None
        reasons = (end.reason for end in ends if end.state == state)
        return LeaseOutcome(lease.serial, state, next(reasons, "not all of its cores have decided"))

    def abandoned_pause(self) -> AbandonedPause | None:
        """Returns the pause that an earlier sidecar began and never ended, or None.

        If several cores are paused, the result is of a core with incomplete weights, if any.
        """
        found: list[AbandonedPause] = []
        for page in self._lease_pages:
            try:
                flags = CoreStatusReader(page.path.with_suffix(".page")).read().flags
            except NoPage:
                continue
            left = page.abandoned_pause(paused=bool(flags & LOCALLY_PAUSED))
            found += [left] if left is not None else []
        return next((left for left in found if left.partial), found[0] if found else None)

    def view(self) -> CoreStatusView | None:
        """Returns what the core's status page shows now; None without a page."""
        if self._page is None:
            return None
        try:
            return self._page.read()
        except NoPage:
            return None

    def requests(self) -> int | None:
        """Returns how many requests run or wait in the engine's core.

        The result is None if the number is unknown, because there is no readable status page, or
        the engine has several cores.
        """
        view = self.view() if self._cores == 1 else None
        return None if view is None else view.waiting + view.running

    def check_coordinator(self) -> None:
        """Logs an error, once, if the DP coordinator that this rank started is gone."""
        if self._coordinator_pid and not is_alive(self._coordinator_pid):
            self._log.error(
                "dp_coordinator_died",
                pid=self._coordinator_pid,
                hint="running waves continue, but an idle DP group may not wake for a request: "
                "restart all its ranks",
            )
            self._coordinator_pid = 0


def check_ranks(who: str, parallel: Mapping[str, Any]) -> None:
    """Refuses a vLLM if the bus can't pause each of its data parallel ranks.

    One sidecar drives one rank, or one engine with all its ranks, and their number must stay the
    same.

    Args:
        who: the engine, in words.
        parallel: the fields of vLLM's ``ParallelConfig``.

    Raises:
        EngineError: says what was found, and how to boot instead.
    """
    if parallel.get("data_parallel_hybrid_lb"):
        raise EngineError(
            f"{who} has --data-parallel-hybrid-lb, which puts several ranks of a DP group behind "
            "one engine: start it with --data-parallel-external-lb, with one sidecar per rank"
        )
    if parallel.get("enable_elastic_ep"):
        raise EngineError(
            f"{who} has --enable-elastic-ep, with which ranks join and leave a DP group while it "
            "serves. The bus pauses and updates a fixed set of ranks: start it without "
            "--enable-elastic-ep, and restart all ranks to change how many there are"
        )


def _refuse_uncoordinated(facts: WorkerFacts, dp_size: int) -> None:
    if facts.coordinator != "bus":
        raise EngineError(
            "--dp-coordinator bus: this vLLM was booted with its own coordinator, which can't be "
            f"replaced while it runs. Start every rank with {environment.DP_COORDINATOR}=bus, "
            f"{environment.BROKER}, {environment.GROUP} and {environment.DP_GROUP} in its "
            "environment, or leave --dp-coordinator out"
        )
    if dp_size == 1:
        raise EngineError(
            "--dp-coordinator bus: this vLLM has one data parallel rank, or one server for all: "
            "there is nothing to coordinate. Give --data-parallel-size and "
            "--data-parallel-external-lb, or leave --dp-coordinator out"
        )


def parse_version(text: str) -> int:
    """Returns the weight version that vLLM stores as text.

    Other texts, such as vLLM's ``default``, count as version 0: nothing was committed yet.
    """
    return int(text) if text.isascii() and text.isdigit() else 0


def driven_backends(chosen: str) -> tuple[str, ...]:
    """Returns the transfer backends over which an engine can be updated.

    Args:
        chosen: the backend with which vLLM was booted. All of wavebus's backends work with any
            choice; one of vLLM's own works only if it was chosen.
    """
    ours = receiver_backends()
    return ours if chosen == BACKEND else (*ours, native_name(chosen))
