"""The embedded engine's adapter: implements the sidecar's interface in this process."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from bus._weight_transfer.registry import receiver_backends
from bus.errors import EngineDead, EngineError, UsageError, wrong_state
from bus.messages import RequestLimits
from bus.operations import (
    ArmManifest,
    Done,
    Extend,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
    SwapStaged,
)
from sidecar._embedded.config import read_config
from sidecar._embedded.core import EngineCore
from sidecar._embedded.model import ModelRunner
from sidecar._embedded.parallel.rank import DpRank
from sidecar._embedded.probing import probe_requests
from sidecar._embedded.requests import Delta, Generation, GenerationRequest
from sidecar._embedded.server import DataPlane
from sidecar._embedded.update import Updater
from sidecar._embedded.weights import load_folder
from sidecar._shared_pages.core_status import CoreStatusPage
from sidecar.engine import EngineInfo, require_model, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from bus.messages import PauseMode, ProbeResult, SleepLevel
    from bus.operations import UpdateOperation
    from sidecar._embedded.parallel.lease import EmbeddedLease
    from sidecar._embedded.parallel.options import DataParallel
    from sidecar._embedded.qwen3 import Exchange, Qwen3Config
    from sidecar._embedded.sampling import SamplingParams
    from sidecar._shared_pages.core_status import CoreStatusView
    from sidecar._shared_pages.pause_lease import AbandonedPause, LeaseOutcome, PauseLease

T = TypeVar("T")

SOFTWARE: Final = "wavebus-embedded 0.1"
DEFAULT_MAX_LEN: Final = 2048
_EXACT: Final = True  # draws are keyed by position


class EmbeddedEngine:
    """A small inference engine in this process: serves requests, and takes updates.

    As with vLLM, cancelling a call of :class:`sidecar.engine.Engine` does not undo the call.

    Args:
        model: a folder with ``config.json`` and ``*.safetensors`` of a Qwen3 model.
        host: the address of the HTTP server; None: there is none.
        port: the server's port; 0: any free port.
        api_key: the key that the server's clients need; empty: none.
        max_num_seqs: how many sequences may run at once; others wait.
        max_model_len: tokens of prompt and output. Default: the model's limit, at most 2048.
        dtype: ``float32``, ``bfloat16``, or ``auto`` for the checkpoint's.
        served_model_name: the name in ``/v1/models``. Default: the folder's path.
        dp: the engine's rank in a data parallel group, whose model needs experts. :meth:`start`
            returns when all ranks are up. If one rank closes or dies, the others end, too. A call
            that pauses or resumes returns when all ranks have been called.
        core_page: a file for the core's status page, for other processes.
        step_ms: the least time that a step takes, in ms, to imitate a larger model.
        boot_closed: whether admission is closed until a sidecar has joined and opens it.

    Raises:
        UsageError: the folder or an option can't be used.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        api_key: str = "",
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        dtype: str = "auto",
        served_model_name: str | None = None,
        dp: DataParallel | None = None,
        core_page: Path | None = None,
        step_ms: float = 0.0,
        boot_closed: bool = False,
    ) -> None:
        self._folder = Path(model)
        self._config = read_config(self._folder, dtype)
        self.max_num_seqs = max_num_seqs
        if max_num_seqs < 1:
            raise UsageError(f"max_num_seqs={max_num_seqs}: must be at least 1")
        longest = self._config.max_positions
        if max_model_len is not None and not 1 < max_model_len <= longest:
            raise UsageError(f"max_model_len={max_model_len}: must be 2 to {longest}")
        self.max_model_len = max_model_len or min(longest, DEFAULT_MAX_LEN)
        self.vocab_size = self._config.vocab_size
        self.model_name = served_model_name or str(model)
        self._step_ms = step_ms
        self._boot_closed = boot_closed
        self._dp = dp
        if dp is not None and self._config.experts < dp.size:
            raise UsageError(
                f"model={model}: a model with {self._config.experts} experts can't be spread over "
                f"{dp.size} data parallel ranks; start separate engines"
            )
        self._rank: DpRank | None = None
        self._page = CoreStatusPage(core_page, rank=dp.rank if dp else 0)
        self._server = DataPlane(self, host, port, api_key) if host is not None else None
        self._generations: dict[str, Generation] = {}
        self._ids = itertools.count(1)
        self._core: EngineCore | None = None
        self._updater: Updater | None = None
        self._lease: EmbeddedLease | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: asyncio.Future[str] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._closed = False
        # Receivers may be tied to the thread that opened them.
        self._transport_thread = ThreadPoolExecutor(1, thread_name_prefix="wavebus-receive")

    # Life

    async def start(self) -> EngineInfo:
        """Loads the model and begins to serve; returns the engine's properties."""
        self._loop = asyncio.get_running_loop()
        self._death = self._loop.create_future()
        try:
            await self._boot()
            await self.admit(open=not self._boot_closed)
            endpoint = await self._server.start() if self._server else ""
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise EngineError(f"can't listen: {error}; choose another --port") from error
            raise
        return EngineInfo(
            kind="embedded",
            software=SOFTWARE,
            model=self.model_name,
            dp_rank=self._dp.rank if self._dp else 0,
            dp_size=self._dp.size if self._dp else 1,
            workers=1,
            backends=receiver_backends(),
            endpoint=endpoint,
            can_sleep=True,
            canary="keep",
            booted_closed=self._boot_closed,
            ends_with_sidecar=True,
            dtype=self._config.dtype,
            limits=RequestLimits(self.vocab_size, self.max_model_len, self.max_num_seqs, _EXACT),
        )

    async def close(self) -> None:
        """Ends every request with the tokens it has, and frees all resources."""
        if self._closed:
            return
        self._closed = True
        if self._rank is not None:
            self._rank.leave()
        if self._core is not None:
            await asyncio.to_thread(self._core.stop)
        for generation in self._generations.values():
            # A core that is blocked in a step did not end its requests.
            generation.fail(EngineDead("the engine is closed"))
        if self._server:
            await self._server.close()
        if self._updater is not None and self._loop is not None:
            await self._loop.run_in_executor(self._transport_thread, self._updater.close)
        self._transport_thread.shutdown(wait=False)
        if self._rank is not None:
            await self._rank.close()

    async def died(self) -> str:
        """Waits until the engine dies, and returns the reason."""
        if self._death is None:
            raise EngineError("the engine is not started")
        return await asyncio.shield(self._death)

    @property
    def is_alive(self) -> bool:
        """Whether the engine has started, and neither closed nor crashed."""
        return self._death is not None and not self._closed and not self._death.done()

    async def in_flight(self) -> int:
        """Returns how many requests have not ended."""
        return len(self._generations)

    async def request_ids(self) -> tuple[str, ...]:
        """Returns the ids of the requests that have not ended."""
        return tuple(self._generations)

    def core_view(self) -> CoreStatusView | None:
        """Returns what the core's status page shows now; None after the engine's end."""
        return None if self._closed else self._page.view()

    def write_pause_lease(self, lease: PauseLease | None) -> LeaseOutcome | None:
        """Writes the pause lease of a rank; an engine alone needs none."""
        return None if self._lease is None else self._lease.page.write_lease(lease)

    def abandoned_pause(self) -> AbandonedPause | None:
        """Returns None: the engine ends with its sidecar, so no pause is left behind."""
        return None

    async def version(self) -> int:
        """Returns the version of the weights that are served; 0 before the first commit."""
        return self._started().version

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, stream: bool = True
    ) -> Generation:
        """Begins a request, and returns an iterator over its results.

        The caller has checked the request (:func:`sidecar._embedded.http_messages.check_request`).

        Args:
            token_ids: the prompt, shorter than ``max_model_len``.
            params: how to choose tokens, and when to stop.
            stream: True: each token is yielded as soon as it is there; False: each choice when it
                has ended.

        Raises:
            EngineDead: the engine is gone.
        """
        core, request_id = self._started(), str(next(self._ids))
        room = self.max_model_len - len(token_ids)
        request = GenerationRequest(
            id=request_id,
            prompt=tuple(token_ids),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=self._config.eos_ids,
            stream=stream,
        )
        core.submit(request, self._rank.on_request() if self._rank else 0)
        generation = Generation(request_id, params.n, self._abort_request)
        self._generations[request_id] = generation
        return generation

    # Control

    async def join_run(self, run: str) -> None:
        """Does nothing, because no other engine's entries are in this engine's caches."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> int:
        """Stops generation; returns once no step runs and none will start."""
        await _answer(self._started().pause(mode, clear_cache=clear_cache))
        return len(self._generations)

    async def resume(self) -> None:
        """Resumes generation with the next step; refused while an update is open."""
        await self._call(self._update().resume)

    async def sleep(self, level: SleepLevel) -> None:
        """Gives memory back: level 1 keeps a copy of the weights, level 2 discards them."""
        await self._call(partial(self._update().sleep, level))

    async def wake_weights(self) -> None:
        """Allocates the weights' memory again."""
        await self._call(self._started().memory.wake_weights)

    async def wake(self) -> None:
        """Allocates all memory again, and resumes generation."""
        await self._call(self._update().wake)

    async def admit(self, *, open: bool) -> None:  # noqa: A002 - as in the protocol
        """Opens or closes admission; while it is closed, new requests end without a token."""
        await _answer(self._started().admit(open=open))

    async def abort_requests(self) -> int:
        """Ends every request with the tokens it has; returns how many there were."""
        return await _answer(self._started().abort_all())

    async def clear_cache(self) -> None:
        """Discards keys and values of all requests; allowed only in a pause."""
        await _answer(self._started().clear_cache())

    async def perform(self, operation: UpdateOperation) -> Done:
        """Carries out an operation of an update; each chunk is loaded before the next one comes."""
        self._started()
        require_model(getattr(operation, "target", "model"))
        updater = self._update()
        match operation:
            case Open():
                await self._transport(partial(updater.open_transfer, operation))
            case ArmManifest(manifest=manifest, staging=staging) if manifest is not None:
                return Done(room=updater.arm(manifest, staging))
            case Extend(part=part):
                await self._call(partial(updater.extend, part))
            case Start(recover=recover, staged=staged):
                await self._call(partial(updater.start, recover=recover, staged=staged))
            case ReceiveChunk(seq=seq):
                short = updater.is_short(updater.tensors_of(seq))
                await self._transport(partial(updater.receive, operation), short=short)
            case LoadChunk():
                await self._load(operation)
            case Finish():
                await self._call(updater.finish)
            case Restore():
                await self._call(updater.restore)
            case SwapStaged(version=version, clear_cache=clears):
                check = partial(updater.require_staged, version)
                take = partial(updater.swap, version)
                await _answer(self._started().swap(check, take, clear_cache=clears))
                return Done(in_flight=len(self._generations))
            case _:
                raise unsupported(operation)
        return Done()

    async def _load(self, chunk: LoadChunk) -> None:
        """Verifies the received chunk, and copies it into the weights or the staged ones."""
        updater = self._update()
        if chunk.sums:
            short = updater.is_short(len(chunk.sums), chunk.verify)
            verify = partial(updater.verify, chunk.seq, chunk.verify, chunk.sums)
            await self._transport(verify, short=short)
        if chunk.staged:
            await self._transport(partial(updater.stage, chunk.seq))
        else:
            await self._call(partial(updater.load, chunk.seq))

    async def probe(
        self,
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        salt: str,  # noqa: ARG002 - there is no prefix cache
        *,
        mode: PauseMode,  # noqa: ARG002 - frozen requests stay so
        clear_cache: bool,  # noqa: ARG002 - the cache is given back
    ) -> tuple[ProbeResult, ...]:
        """Runs the canary's probes in the pause, and leaves the engine's requests unchanged."""
        core, updater = self._started(), self._update()
        updater.require_finished("a probe")
        requests = probe_requests(
            prompts, max_tokens, max_len=self.max_model_len, vocab_size=self.vocab_size
        )
        return await _answer(core.probe(requests))

    async def commit(self, version: int) -> None:
        """Makes the engine report the loaded weights as ``version`` from now on."""
        await self._call(partial(self._update().commit, version))

    async def call_off(self) -> None:
        """Cancels a swap that waits for peer ranks, unless all have agreed to swap."""
        await _answer(self._started().call_off())

    # Inside

    async def _boot(self) -> None:
        """Makes and starts the core; with ``dp``, as soon as all ranks are ready."""
        exchange: Exchange | None = None
        if self._dp is not None:
            self._rank = DpRank(self._dp, self._on_lost)
            exchange = await self._rank.join(msgspec.structs.asdict(self._config))
        shape = {"slots": self.max_num_seqs, "max_len": self.max_model_len}
        model = await asyncio.to_thread(_load, self._config, self._folder, exchange, **shape)
        make = self._rank.make_core if self._rank else EngineCore
        self._core = make(
            model,
            slots=self.max_num_seqs,
            publish=lambda deltas: self._in_loop(lambda: self._dispatch(deltas)),
            died=lambda reason: self._in_loop(lambda: self._on_core_died(reason)),
            page=self._page,
        )
        self._core.step_s = self._step_ms / 1000
        self._updater = Updater(self._core)
        if self._rank is not None:
            await self._rank.ready()
            self._lease = self._rank.watch_lease(self._updater)
        self._core.start()

    def _started(self) -> EngineCore:
        if self._closed:
            raise EngineDead("the engine is closed")
        if self._core is None:
            raise wrong_state("the engine is not started")
        if self._death is not None and self._death.done():
            raise EngineDead(self._death.result())
        return self._core

    def _update(self) -> Updater:
        self._started()
        assert self._updater is not None, "made together with the core"
        return self._updater

    async def _call(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the core's thread, between two steps."""
        await _answer(self._started().call(action))

    async def _transport(self, action: Callable[[], None], *, short: bool = False) -> None:
        """Runs ``action`` in the receiver's thread, because it may block; inline if ``short``."""
        self._started()
        if short:
            action()
            return
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(self._transport_thread, action))

    def _in_loop(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the event loop, from another thread, unless the loop is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _dispatch(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                generation.push(delta)
                if generation.done.is_set():
                    del self._generations[delta.request_id]

    def _on_lost(self, reason: str) -> None:
        """Ends the engine, because another rank or the DP coordinator has gone."""
        self._fail_requests(reason)
        if self._core is not None:
            self._core.fail(reason)

    def _on_core_died(self, reason: str) -> None:
        async def bury() -> None:
            known = await self._rank.explain(reason) if self._rank else reason
            if known is not None:
                self._fail_requests(known)

        self._burial = asyncio.create_task(bury())

    def _fail_requests(self, reason: str) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)
        for generation in self._generations.values():
            generation.fail(EngineDead(reason))
        self._generations.clear()

    def _abort_request(self, request_id: str) -> None:
        if self.is_alive and self._core is not None:
            self._core.abort(request_id)


def _load(
    config: Qwen3Config, folder: Path, exchange: Exchange | None, *, slots: int, max_len: int
) -> ModelRunner:
    model = ModelRunner(config, slots=slots, max_len=max_len, exchange=exchange)
    load_folder(model.expected, model.parameters, folder)
    return model


async def _answer(future: Future[T]) -> T:
    """Waits for the core. Cancelling the wait does not cancel the call."""
    return await asyncio.shield(asyncio.wrap_future(future))
