"""What is true inside a simulated engine, whatever anybody says of it.

It knows no protocol. It is told of every engine call when the call is made and when
it returns or fails, and raises :class:`InvariantViolation` as soon as an engine is made to do
what must never be done: resumed without a completed pause, loaded while it generates,
a chunk loaded twice, unsent or unverified, committed half-loaded, generating with mixed
weights, put to sleep while it generates, armed or loaded while its weights sleep, probed before
it has finished, committed although its probes differ, resumed behind a closed admission, staged
beside weights that are not whole, swapped before all is staged, given a chunk while the memory
of another sender than the chunk's is open to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bus._lora import adapter_of
from bus._protocol.engine.calls import (
    Call,
    CallAbortRequests,
    CallAdmit,
    CallCommit,
    CallPause,
    CallProbe,
    CallResume,
    CallSleep,
    CallStrengthenPause,
    CallWakeWeights,
)
from bus.errors import EngineError
from bus.messages import NackCode, ProbeResult
from bus.operations import (
    ArmManifest,
    Extend,
    Finish,
    LoadChunk,
    Open,
    ReceiveChunk,
    Restore,
    Start,
    SwapStaged,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bus._manifest import Manifest
    from bus.messages import Target

GARBLED: Final = -1  # the payload of what broke on its way
GONE: Final = -2  # of what a sleep has discarded


class InvariantViolation(AssertionError):
    """An engine was made to do what must never be done."""


class GroundTruth:
    """One engine's state on its device.

    Attributes:
        running: it may generate. True from the moment a resume is called.
        idle: a pause has returned, and nothing has been resumed since.
        models: of each target, per tensor, the payload that was loaded into it last.
        version: what it serves; changes when a commit returns.
        committed: of each target, the payload that was committed last.
        loaded: chunks loaded since the last start, in order.
        sent: chunks of which the sender has said that they have left, by the caller's word.
        broken: the targets of which an update broke off after a load.
        staged: chunks that are received and not loaded yet, with their payloads.
        ahead: how many it has room for.
        in_flight: requests held.
        twisted: its probes of this update differ.
        unconfirmed: probes have failed, which were to resume it and pause it again.
        asleep: which of its memory sleeps, or may: of ``weights`` and ``cache``.
        closed: its admission is.
        cleared: the pause has dropped keys, values and prefix caches.
        to_clear: it was to.
        group_version: what its group serves, as the engine has been told last.
        adapters: the LoRA adapters that it has.
        removals: by version, which adapter a commit has removed.

    Args:
        draft: it has a draft model, of the same tensors.
    """

    def __init__(
        self, name: str, tensors: Iterable[str], *, version: int = 0, draft: bool = False
    ) -> None:
        self.name = name
        self.running = True
        self.idle = False
        targets: tuple[Target, ...] = ("model", "draft") if draft else ("model",)
        model = dict.fromkeys(tensors, version)
        self.models: dict[Target, dict[str, int]] = {each: dict(model) for each in targets}
        self.version = version
        self.committed: dict[Target, int] = dict.fromkeys(targets, version)
        self.manifest: Manifest | None = None
        self.loaded: list[int] = []
        self.broken: set[Target] = set()
        self.in_flight = 0
        self.twisted = False
        self.unconfirmed = False
        self.asleep: set[str] = set()
        self.closed = self.cleared = self.to_clear = False
        self.group_version = 0
        self.adapters: set[str] = set()
        self.removals: dict[int, str] = {}
        self._removed = ""  # the adapter that the update under way has removed
        self.pauses = 0
        self.resumes = 0
        self.commits: list[int] = []
        self.aborted_requests = 0
        self.transfer: Open | None = None
        self.sent: dict[int, bool] = {}  # chunks that have left, and whether to verify them
        self._target: Target = "model"  # of the update, from its ARM on
        self._staged_weights: dict[str, int] | None = (
            None  # per tensor, what is staged; none: in place
        )
        self._started = False
        self._begun: Target = "model"  # what was started last
        self._finished = False
        self._load_begun = False
        self.prefetch_depth = 1
        self.staged: dict[int, int] = {}  # per chunk, its payload
        self._call: Call | None = None

    @property
    def weights(self) -> dict[str, int]:
        """The model's, per tensor."""
        return self.models["model"]

    @property
    def is_mixed(self) -> bool:
        """Whether the tensors of one of its models hold weights of more than one update."""
        return any(len(set(weights.values())) > 1 for weights in self.models.values())

    @property
    def has_uncommitted(self) -> bool:
        """Whether one of its models holds weights that were not committed."""
        return any(
            set(weights.values()) != {self.committed[target]}
            for target, weights in self.models.items()
        )

    def begin(self, call: Call) -> None:
        """A call is made."""
        if self._call is not None:
            self._refuse(f"{call} is called while {self._call} runs")
        self._call = call
        match call:
            case CallPause():
                if not self.running and not self.unconfirmed:
                    self._refuse("paused twice")
            case CallStrengthenPause():
                self._require_idle("its pause does more")
            case CallSleep():
                self._begin_sleep(call)
            case CallWakeWeights():
                self._require_idle("its weights are woken")
            case CallResume(asleep, opens):
                self._check_admission(opens=opens)
                self._begin_resume(asleep=asleep)
            case Open() | CallAbortRequests():
                pass
            case CallAdmit():
                if self.version < self.group_version or self.is_mixed or self.broken:
                    self._refuse("opened, and is not to serve")
            case _:
                self._begin_of_update(call)

    def _begin_of_update(self, call: Call) -> None:
        match call:
            case ArmManifest(manifest=manifest):
                assert manifest is not None
                self._check_manifest(manifest)
            case Extend():
                known = self.manifest
                if known is None or not known.is_open or len(self.loaded) != known.chunks:
                    self._refuse(f"{known} is extended with chunks {self.loaded}")
            case Start(target=target, recover=recover, staged=staged):
                if not staged:
                    self._require_weights("an update is started")
                elif self.broken or "weights" in self.asleep:
                    self._refuse("staged beside weights that are not there")
                if target != self._target:
                    self._refuse(f"an update of the {target} starts, armed is the {self._target}")
                if recover is not bool(self.broken):
                    self._refuse(f"start_update(recover={recover}), but broken is {self.broken}")
            case ReceiveChunk():
                self._receive(call)
            case LoadChunk():
                self._begin_load(call)
            case Restore() if self._staged_weights is not None:
                pass
            case Restore(target):
                if self._load_begun or target != self._target:
                    self._refuse("restored after a load: the old weights are gone")
            case Finish():
                self._require_target("an update is finished")
                if self.manifest is None or len(self.loaded) != self.manifest.chunks:
                    self._refuse(f"finished with chunks {self.loaded}")
            case CallProbe():
                self._require_weights("it is probed")
                if not self._finished:
                    self._refuse("probed before it was finished")
            case CallCommit(version):
                self._begin_commit(version)
            case SwapStaged(version):
                if len(set((self._staged_weights or {}).values())) > 1:
                    self._refuse(f"swaps in mixed weights {self._staged_weights}")
                if self._staged_weights is None or not self._finished or version <= self.version:
                    self._refuse(f"swaps to {version}, staged is {self._staged_weights}")

    def swap(self, version: int) -> None:
        """Between two steps, at any time of a :class:`SwapStaged`."""
        assert self._staged_weights is not None
        self.models[self._target] = dict(self._staged_weights)
        self._serve(version)

    def _begin_resume(self, *, asleep: bool) -> None:
        if not self.idle or self.unconfirmed:
            self._refuse("resumed without a completed pause")
        if self.asleep and not asleep:
            self._refuse(f"resumed while {self.asleep} sleep")
        if self.to_clear and not self.cleared:
            self._refuse("resumed over the keys and values that its pause was to drop")
        if self.is_mixed or self.broken or (self._started and self._staged_weights is None):
            self._refuse(f"resumed with mixed weights {self.models}")
        self.idle = False
        self.running = True

    def on_core_resumed(self) -> None:
        """Its core has resumed it, with all ranks; admission is left as it is."""
        self._begin_resume(asleep=True)
        self.asleep.clear()
        self.to_clear = False
        self.resumes += 1

    def _check_admission(self, *, opens: bool) -> None:
        """Who is resumed serves, unless it is behind."""
        is_stale = self.version < self.group_version
        if is_stale and (opens or not self.closed):
            self._refuse(f"resumed to serve {self.version}, its group is at {self.group_version}")
        if self.closed and not opens and not is_stale:
            self._refuse("resumed with its admission closed")

    def end(self, call: Call) -> None:
        """The call has returned."""
        self._call = None
        match call:
            case CallPause(clear_cache=clear_cache):
                self.running = self.unconfirmed = False
                self.idle = True
                self.cleared = clear_cache
                self.pauses += 1
            case CallStrengthenPause(aborts, clears):
                self.cleared = self.cleared or clears
                self.in_flight = 0 if aborts else self.in_flight
            case CallSleep(clears=clears):
                self.cleared = self.cleared or clears
            case CallWakeWeights():
                self.asleep.discard("weights")
            case CallResume(opens=opens):
                self.closed = self.closed and not opens
                self.asleep.clear()
                self.to_clear = False  # a pause beside a peer rank's is asked to drop nothing
                self.resumes += 1
            case Open():
                self.transfer = call
            case ArmManifest():
                self._arm(call)
            case Extend(part):
                assert self.manifest is not None
                self.manifest = self.manifest.join(part)
            case Start(target=target, staged=staged):
                self._start(target, staged=staged)
                self._finished = self._load_begun = self.twisted = False
                self.sent = {}
            case ReceiveChunk() | LoadChunk():
                self._end_chunk(call)
            case Restore():
                self._started = False
                self._staged_weights = None
                self._restore_adapter()
            case Finish():
                self._finished = True
                self._remove_adapter()
            case CallCommit(version):
                self._serve(version)
            case CallAbortRequests():
                self.closed = True
                self.aborted_requests += self.in_flight
                self.in_flight = 0
                if self._load_begun:
                    self._break_off()
            case CallAdmit():
                self.closed = False

    def fail(self, call: Call) -> None:
        """The call has raised."""
        self._call = None
        match call:
            case CallResume():
                self.running = False
                self.idle = True
                if self.asleep:
                    self.asleep = {"weights", "cache"}
            case Start(target=target, staged=staged):
                self._load_begun = not (staged or self._adapter)  # half started
                self._start(target, staged=staged)
            case ReceiveChunk() | LoadChunk():
                self.staged.clear()
            case CallProbe():
                self.unconfirmed = True
            case Restore() if self._staged_weights is not None:
                self._started, self._staged_weights = False, None
            case Restore():
                self._break_off()
            case CallAbortRequests() if self._load_begun:
                self._break_off()
            case Open():
                self.transfer = None
            case _:
                pass

    def _start(self, target: Target, *, staged: bool) -> None:
        self._started, self._begun = True, target
        self._staged_weights = dict(self.models[target]) if staged else None
        self.loaded = []
        self.staged.clear()

    def on_escalated(self, *, clear_cache: bool) -> None:
        """A second pause, beside one that may have failed, has returned."""
        self.cleared = self.cleared or clear_cache
        self.running = False
        self.idle = True

    def probe(self, *, twisted: bool) -> tuple[ProbeResult, ...]:
        """What a probe gives: its tokens tell which weights the model has."""
        self.twisted = twisted
        tokens = tuple(abs(payload) + twisted for payload in self.weights.values())
        return (ProbeResult(tokens, (0.0,) * len(tokens)),)

    def garble(self) -> None:
        """What was received is not what was sent."""
        self.staged[max(self.staged)] = GARBLED

    def refusal(self, call: Call) -> EngineError | None:
        """What the engine itself has against a call: a manifest that does not fit."""
        weights = self.models[call.target if isinstance(call, ArmManifest) else self._target]
        if isinstance(call, ArmManifest | Extend):
            told = call.manifest if isinstance(call, ArmManifest) else call.part
            named = () if told is None else told.names
            unknown = [name for name in named if name not in weights]
            if unknown:
                return EngineError(
                    "the model has no such tensor",
                    code=NackCode.MANIFEST_REFUSED,
                    tensor=unknown[0],
                )
        whole = self.manifest if isinstance(call, Finish) else None
        whole = whole if whole and whole.names else None  # a removal has none
        armed = call.manifest if isinstance(call, ArmManifest) else None
        if armed is not None and not armed.is_open and armed.names:
            whole = armed
        missing = [name for name in weights if whole is not None and name not in whole.names]
        if missing:
            return EngineError(
                "the manifest lacks it", code=NackCode.MANIFEST_REFUSED, tensor=missing[0]
            )
        if isinstance(call, LoadChunk) and (wrong := self._mismatched(call)):
            code = NackCode.CHECKSUM_MISMATCH
            return EngineError("not what was sent", code=code, tensor=wrong[0])
        return None

    # -- inside ---------------------------------------------------------------

    def _arm(self, call: ArmManifest) -> None:
        self.manifest, self._target = call.manifest, call.target
        if call.drops_adapters:
            self.adapters.clear()

    @property
    def _adapter(self) -> str:
        """The one that the update removes."""
        return "" if self.transfer is None else adapter_of(self.transfer.backend)

    def _remove_adapter(self) -> None:
        if self._adapter in self.adapters:
            self.adapters.discard(self._adapter)
            self._removed = self._adapter

    def _restore_adapter(self) -> None:
        if self._removed:
            self.adapters.add(self._removed)
        self._removed = ""

    @property
    def is_removal(self) -> bool:
        """Whether the last commit was one of a removal."""
        return self.version in self.removals

    def _serve(self, version: int) -> None:
        self.version = version
        self.commits.append(version)
        self._removed = ""
        if self._adapter:
            self.removals[version] = self._adapter
            self._started = self._finished = False
            return
        self.committed[self._target] = next(iter(self.models[self._target].values()))
        self.broken.discard(self._target)
        self._started = self._finished = self._load_begun = False
        self._staged_weights = None

    def _receive(self, call: ReceiveChunk) -> None:
        self._require_target("a chunk is received")
        if not self._started or self.manifest is None:
            self._refuse("a chunk comes before the start")
        elif call.seq != len(self.loaded) + len(self.staged):
            self._refuse(f"chunk {call.seq} is received after {self.loaded}, {self.staged}")
        elif len(self.staged) >= self.prefetch_depth:
            self._refuse(f"chunk {call.seq} is received ahead of {sorted(self.staged)}")
        elif call.seq >= self.manifest.chunks:
            self._refuse(f"chunk {call.seq} is not the one of the manifest")
        elif call.staged is not (self._staged_weights is not None):
            self._refuse(f"{call} is received elsewhere than the update was started")
        sender, opened = call.handle.partition(b" ")[2], self.transfer
        if sender and (opened is None or opened.params != sender):
            self._refuse(f"chunk {call.seq} of sender {sender!r} is read over {opened}")

    def _mismatched(self, call: LoadChunk) -> list[str]:
        """The tensors of what is staged that are not what was sent, as far as its sums say."""
        if call.seq not in self.staged or self.manifest is None:
            return []
        payload = self.staged[call.seq]
        metas = self.manifest.chunk(call.seq)
        return [meta.name for meta, sent in zip(metas, call.sums, strict=False) if sent != payload]

    def _begin_load(self, call: LoadChunk) -> None:
        chunk = call.seq
        self._require_target("a chunk is loaded")
        self._require_staged(chunk, "loaded")
        if chunk not in self.sent:
            self._refuse(f"chunk {chunk} is loaded before it is sent")
        if self.sent[chunk] and not call.sums:
            self._refuse(f"chunk {chunk} is loaded unverified")
        if chunk in self.loaded or chunk != len(self.loaded):
            self._refuse(f"chunk {chunk} is loaded after {self.loaded}")
        if self._mismatched(call) or self._staged_weights is not None:
            return
        self._load_begun = True
        assert self.manifest is not None
        self.models[self._target][self.manifest.chunk(chunk)[0].name] = self.staged[chunk]

    def _end_chunk(self, call: ReceiveChunk | LoadChunk) -> None:
        assert self.manifest is not None
        if isinstance(call, ReceiveChunk):
            self.staged[call.seq] = int(call.handle.partition(b" ")[0])
            return
        payload = self.staged.pop(call.seq)
        weights = (
            self.models[self._target] if self._staged_weights is None else self._staged_weights
        )
        for meta in self.manifest.chunk(call.seq):
            weights[meta.name] = payload
        self.loaded.append(call.seq)

    def _require_staged(self, chunk: int, what: str) -> None:
        if chunk not in self.staged:
            self._refuse(f"chunk {chunk} is {what}, staged is {self.staged}")

    def _begin_commit(self, version: int) -> None:
        self._require_idle("an update is committed")
        if not self._finished:
            self._refuse("committed before it was finished")
        if self.twisted or self.unconfirmed:
            self._refuse("committed although its probes differ")
        weights = self.models[self._target]
        if len(set(weights.values())) > 1 and not self._adapter:
            self._refuse(f"committed with mixed weights {weights}")
        again = version == self.version and set(weights.values()) == {self.committed[self._target]}
        back = version < self.version and version == self.group_version  # it has committed alone
        if version <= self.version and not (again or back):
            self._refuse(f"version {version} after {self.version}, of {weights}")

    def _break_off(self) -> None:
        self.broken.add(self._target)
        self._started = self._finished = self._load_begun = False

    def _begin_sleep(self, call: CallSleep) -> None:
        self._require_idle("it is put to sleep")
        if "weights" in self.asleep:
            self._refuse("it is put to sleep twice")
        if self._started and self._begun not in self.broken:
            self._refuse("it is put to sleep in the middle of an update")
        if not (self.cleared or call.clears):
            self._refuse("it is put to sleep with keys and values that requests still use")
        self.asleep = {"weights", "cache"}
        if call.level == 2:
            for target, weights in self.models.items():
                self.models[target] = dict.fromkeys(weights, GONE)
            self.broken.update(self.models)

    def _check_manifest(self, manifest: Manifest) -> None:
        if "weights" in self.asleep:
            self._refuse("a manifest is armed while the weights sleep")
        if self._started and self._begun not in self.broken:
            self._refuse(f"a manifest of {manifest.chunks} chunks in the middle of an update")

    def _require_target(self, what: str) -> None:
        """The weights; or what is staged beside them, while they are served."""
        if self._staged_weights is None:
            self._require_weights(what)

    def _require_weights(self, what: str) -> None:
        self._require_idle(what)
        if "weights" in self.asleep:
            self._refuse(f"{what} while the weights sleep")

    def _require_idle(self, what: str) -> None:
        if self.running or not self.idle:
            self._refuse(f"{what} while it may generate")

    def _refuse(self, what: str) -> None:
        raise InvariantViolation(f"{self.name}: {what}")
