"""The adapter of vLLM: implements the sidecar's engine interface by vLLM's calls.

The adapter decides which calls of vLLM each method takes, in which order, and what wavebus adds to
them. A connection makes these calls: over HTTP (:mod:`sidecar._vllm.connection_http`) or in process
(:mod:`sidecar._vllm.connection_inprocess`). Both connections have the same methods.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import anyio
from msgspec.structs import replace

from bus._vllm.versions import require_supported, untested_reason
from bus.errors import EngineError
from bus.operations import Restore
from sidecar._vllm.admission import AdmissionControl
from sidecar._vllm.core_state import CoreLink, check_ranks, driven_backends, parse_version
from sidecar._vllm.plugin import worker_rpc
from sidecar._vllm.plugin.compat import check_backend
from sidecar._vllm.worker_client import WorkerClient
from sidecar.engine import START_ANSWER_S, EngineInfo, answers_within

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from bus.messages import PauseMode, ProbeResult, SleepLevel
    from bus.operations import SwapStaged
    from sidecar._shared_pages.core_status import CoreStatusView
    from sidecar._shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease
    from sidecar._vllm.plugin.environment import DpCoordinator
    from sidecar._vllm.worker_client import VllmConnection

ABORT_SEEN_S: Final = 1.0


class VllmAdapter(WorkerClient):
    """Implements :class:`sidecar.engine.Engine` for a vLLM engine, over any connection.

    Args:
        connection: makes vLLM's calls, over HTTP or in process.
        dp_coordinator: ``bus`` requires that the bus coordinates the engine's DP group; see
            :mod:`sidecar._vllm.plugin.environment` for how to boot vLLM for that.
    """

    def __init__(self, connection: VllmConnection, dp_coordinator: DpCoordinator = "vllm") -> None:
        super().__init__(connection)
        self._core = CoreLink(dp_coordinator)
        self._admission = AdmissionControl(connection.ask, served=connection.is_served)

    async def start(self) -> EngineInfo:
        """Connects to the engine, or starts its server, and checks that it can be driven.

        Raises:
            EngineError: the engine does not answer in time, is too old, lacks the RL routes or the
                backend, or has another coordinator; the text says how to start it.
            EngineDead: the supervised server has ended.
        """
        await self._vllm.open()
        with answers_within(START_ANSWER_S, f"the engine core of {self._vllm.name}"):
            info = await self._read_info()
        return replace(info, endpoint=await self._vllm.endpoint())

    async def _read_info(self) -> EngineInfo:
        version = await self._vllm.software_version()
        require_supported(version)
        config = await self._vllm.config()
        backend = str((config.get("weight_transfer_config") or {}).get("backend", ""))
        name = self._vllm.name
        check_backend(backend, name)
        # Comes first: without the plugin, a call of its methods would fail in all workers.
        present = await self._vllm.ask(worker_rpc.ASK_PRESENCE)
        worker_rpc.check_drives(present, backend, name)
        parallel = config["parallel_config"]
        check_ranks(name, parallel)
        # Behind an internal load balancer one client pauses all ranks: a DP group of one.
        external = bool(parallel["data_parallel_external_lb"])
        dp_size = int(parallel["data_parallel_size"])
        cores = 1 if external else dp_size
        facts = worker_rpc.read(await self._vllm.ask(worker_rpc.ASK_FACTS))
        self._core.open(facts, dp_size if external else 1, cores=cores, here=self._vllm.is_local)
        await self._hello(facts, cores=cores, backend=backend)
        accepts_probes = await self._vllm.accepts_probes()
        await self._admission.look()
        model = config["model_config"]
        return EngineInfo(
            kind=self._vllm.kind,
            software=f"vllm {version}",
            model=str(model["model"]),
            dp_rank=int(parallel["data_parallel_rank"]) if external else 0,
            dp_size=dp_size if external else 1,
            workers=int(parallel["world_size"]) * cores,
            backends=driven_backends(backend),
            endpoint="",
            can_sleep=bool(model.get("enable_sleep_mode")),
            draft=worker_rpc.read_draft(await self._vllm.ask(worker_rpc.ASK_DRAFT)),
            canary="abort" if self._admission.is_supported and accepts_probes else "",
            closed=self._admission.found_closed,
            booted_closed=self._admission.booted_closed,
            ends_with_sidecar=self._vllm.ends_with_sidecar,
            features=facts.features,
            untested=untested_reason(version),
            dtype=str(model.get("dtype", "")).removeprefix("torch."),
            limits=facts.limits_of(cores),
            kv_connectors=self._caches.connectors,
        )

    async def close(self) -> None:
        """Closes the connection, the workers' staging channels, and the core's pages."""
        self._channels.close()
        self._core.close()
        await self._vllm.close()

    async def died(self) -> str:
        """Waits until the engine is dead, and returns the reason."""
        return await self._vllm.died(self._core.check_coordinator)

    async def in_flight(self) -> int:
        """Returns how many requests run, wait, or are frozen by a pause."""
        return await self._vllm.in_flight(self._core.requests())

    async def request_ids(self) -> tuple[str, ...]:
        """Returns the ids of unfinished requests, as clients chose them.

        Empty also where the engine can't list them.
        """
        return await self._vllm.request_ids()

    def core_view(self) -> CoreStatusView | None:
        """Returns what the core's status page shows now; None without a page."""
        return self._core.view()

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Writes the pause lease; see :meth:`sidecar.engine.Engine.write_pause_lease`."""
        return self._core.write_pause_lease(lease)

    def abandoned_pause(self) -> AbandonedPause | None:
        """Returns the pause that an earlier sidecar has left; None if there is none."""
        return self._core.abandoned_pause()

    async def join_run(self, run: str) -> None:
        """Salts the caches with the id of a run, if this vLLM has salts."""
        await self._caches.join_run(run)

    async def version(self) -> int:
        """Returns the version that the engine serves; 0 before the first commit."""
        return parse_version(await self._vllm.weight_version())

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        """Pauses the engine, and drops the caches if asked; returns the number of requests.

        The caches are dropped in every pause if this vLLM has no salts, or if a KV connector needs
        that.
        """
        pause = self._vllm.pause(mode, clear_cache=self._caches.clears(clear_cache))
        if mode == "keep":  # it ends no requests, so they can be counted at the same time
            in_flight = await self._count_during(pause)
        else:
            await pause
            in_flight = await self._count()
        await self._admission.end_probes()
        return in_flight

    async def _count_during(self, call: Awaitable[object]) -> int:
        """Makes a call, and returns how many requests the engine has during it.

        The call does not wait for the count, which may cost an HTTP request.
        """
        counting = asyncio.create_task(self._count())
        try:
            await call
            return await counting
        finally:
            counting.cancel()

    async def _count(self) -> int:
        """Returns how many requests the engine has; 0 if they can't be counted.

        The number is only reported, so a failed count must not fail the pause or swap.
        """
        try:
            return await self.in_flight()
        except EngineError:
            return 0

    async def resume(self) -> None:
        await self._vllm.resume()

    async def sleep(self, level: SleepLevel) -> None:
        """Makes the workers free memory, by their own sleep method.

        vLLM's sleep call would pause a second time, and a rank would then wait for the other ranks'
        sleep. Staged weights are released first, because a sleep must free their memory.
        """
        if not self._channels.unusable_reason:
            await self._perform(Restore(staged=True))
        await self._vllm.ask("sleep", {"level": level})

    async def wake_weights(self) -> None:
        """Makes the workers allocate the weights' memory again."""
        await self._vllm.ask("wake_up", {"tags": ["weights"]})

    async def wake(self) -> None:
        """Makes the workers allocate all freed memory, then resumes by vLLM's wake-up call.

        vLLM's call finds nothing left to allocate, and only resumes. From 0.33 on it also gives the
        KV connector the cache's new addresses.
        """
        await self._vllm.ask("wake_up", {"tags": None})
        await self._vllm.wake_up()

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        """Opens or closes admission; does nothing for cores without admission control."""
        if self._admission.is_supported:
            await self._admission.admit(open=open)

    async def abort_requests(self) -> int:
        """Ends every request; returns their number once none is left, or after 1 s.

        A server may have several front ends, and each could end only its own requests. So the cores
        end the requests if they have admission control.
        """
        ended = await self._admission.end_requests() if self._vllm.is_shared else None
        if ended is None:
            ended = await self._vllm.abort_requests()
        with anyio.move_on_after(ABORT_SEEN_S):
            while await self._count():  # noqa: ASYNC110 - no event tells it
                await anyio.sleep(ABORT_SEEN_S / 50)
        return ended

    async def clear_cache(self) -> None:
        """Drops keys, values and prefix cache: in the cores, or else by vLLM's own calls."""
        if not await self._caches.clear() and not await self._vllm.reset_caches():
            raise EngineError("vLLM could not drop its prefix cache: some of it is in use")

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,
        *,
        mode: PauseMode,
        clear_cache: bool,
    ) -> tuple[ProbeResult, ...]:
        """Runs a canary's probes: admits only these, resumes, and pauses again afterwards.

        A paused vLLM runs no request, also no probe. Requests from before the pause are ended,
        because they would run beside the probes. Other requests are admitted again when a later
        pause succeeds: until then the engine may run with unproven weights. See
        :meth:`sidecar.engine.Engine.probe`.
        """
        passes = await self._admission.pass_probes(mode)
        try:
            await self.abort_requests()
            await self.resume()
            results = await asyncio.gather(
                *(
                    self._vllm.generate(f"{passes}-{number}", prompt, max_tokens, salt)
                    for number, prompt in enumerate(prompts)
                )
            )
        finally:
            await self.pause(mode, clear_cache=clear_cache)
        return tuple(results)

    async def commit(self, version: int) -> None:
        """Makes vLLM label tokens with ``version`` from now on; keeps a loaded LoRA adapter."""
        await self._adapter.settle()
        await self._vllm.set_weight_version(str(version))

    async def _swap(self, swap: SwapStaged) -> int:
        return await self._count_during(super()._swap(swap))
