"""A whole group in simulated time: one broker, engines, trainers, and a bad network.

Deterministic: one seed, one course of events. After every event the world calls its
``checks``, so that an invariant is looked at continuously and not only at the end.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Final, TypeVar

from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.link import LinkConfig
from bus._protocol.engine.pause import EnginePauseState
from bus._protocol.engine.update_states import EngineUpdateState
from bus._protocol.group.pause import PauseState
from bus._protocol.group.update import UpdateState
from bus._runtime.broker_server import BrokerServer
from tests.sim.clock import SimScheduler
from tests.sim.engine import Behaviour, SimEngine
from tests.sim.memory_journal import MemoryJournal
from tests.sim.memory_network import Faults, MemoryNetwork
from tests.sim.process import Process
from tests.sim.trainer import SimTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bus._protocol.group.group import Group
    from bus.messages import Message

E = TypeVar("E", bound=SimEngine)

GROUP: Final = "policy"
FAST_BROKER: Final = BrokerConfig(
    heartbeat_ms=500, peer_timeout_ms=2000, retry_ms=300, step_timeout_ms=20_000
)
# Impatient, so that schedules have JOINs that come again while an answer is on its way.
FAST_LINK: Final = LinkConfig(retry_ms=300, answer_ms=300, patience_ms=8000)


class SimWorld:
    """See the module.

    Args:
        seed: of the network's faults and of the engines' durations.
        faults: of the network.
        config: the broker's times.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        config: BrokerConfig = FAST_BROKER,
        link_config: LinkConfig = FAST_LINK,
        draft: bool = False,
    ) -> None:
        self.draft = draft  # engines have a draft model
        self.scheduler = SimScheduler()
        self.network = MemoryNetwork(self.scheduler, seed=seed, faults=faults)
        self.config = config
        self.link_config = link_config
        self.engines: dict[str, SimEngine] = {}
        self.trainers: dict[str, SimTrainer] = {}
        self.checks: list[Callable[[], None]] = []
        self.superseded_boots: set[int] = set()  # boots of those whose name has a later life
        self.on_answer: list[Callable[[Message], None]] = []
        self._random = random.Random(seed)
        self._boots = itertools.count(1)
        self.journals: list[MemoryJournal] = []  # of every broker, in order
        self.broker = self._new_broker()

    # -- who is there -------------------------------------------------------------

    @property
    def now_ms(self) -> float:
        return self.scheduler.now_ms()

    @property
    def group(self) -> Group | None:
        """The broker's view of the group; None before anybody has joined, and without a broker."""
        if not self.broker_process.alive:
            return None
        return self.broker.machine.groups.get(GROUP)

    @property
    def existing_group(self) -> Group:
        """The same, when it must be there."""
        group = self.group
        assert group is not None, "nobody has joined"
        return group

    @property
    def live_engines(self) -> list[SimEngine]:
        """Engines whose process lives."""
        return [engine for engine in self.engines.values() if engine.alive]

    def add_dp_group(self, size: int, *, behaviour: Behaviour | None = None) -> list[SimEngine]:
        """A DP group of so many ranks, named ``e0``, ``e1``, … in the order of coming."""
        first = len(self.engines)
        dp_group = f"dp{first}" if size > 1 else ""
        return [
            self.add_engine(
                f"e{first + rank}",
                dp_group=dp_group,
                dp_rank=rank,
                dp_size=size,
                behaviour=behaviour,
            )
            for rank in range(size)
        ]

    def add_engine(
        self,
        name: str,
        *,
        dp_group: str = "",
        dp_rank: int = 0,
        dp_size: int = 1,
        version: int = 0,
        behaviour: Behaviour | None = None,
    ) -> SimEngine:
        """One engine; it begins to join."""
        engine = self.make_engine(
            name,
            dp_group=dp_group,
            dp_rank=dp_rank,
            dp_size=dp_size,
            version=version,
            behaviour=behaviour,
        )
        if name in self.engines:
            self.superseded_boots.add(self.engines[name].boot)
        self.engines[name] = engine
        engine.start()
        return engine

    def make_engine(
        self,
        name: str,
        *,
        dp_group: str = "",
        dp_rank: int = 0,
        dp_size: int = 1,
        version: int = 0,
        behaviour: Behaviour | None = None,
    ) -> SimEngine:
        """An engine that has not begun to join, and is nobody's concern but the caller's."""
        return self._make(
            SimEngine,
            name,
            dp_group=dp_group,
            dp_rank=dp_rank,
            dp_size=dp_size,
            version=version,
            behaviour=behaviour,
        )

    def add_rank(self, kind: type[E], name: str, dp_group: str, dp_rank: int, dp_size: int) -> E:
        """An engine of another kind, a rank of a DP group; it begins to join."""
        engine = self._make(kind, name, dp_group=dp_group, dp_rank=dp_rank, dp_size=dp_size)
        self.engines[name] = engine
        engine.start()
        return engine

    def _make(
        self,
        kind: type[E],
        name: str,
        *,
        dp_group: str,
        dp_rank: int,
        dp_size: int,
        version: int = 0,
        behaviour: Behaviour | None = None,
    ) -> E:
        return kind(
            name,
            process=Process(self.scheduler, self.network),
            boot=next(self._boots),
            group=GROUP,
            dp_group=dp_group,
            dp_rank=dp_rank,
            dp_size=dp_size,
            version=version,
            draft=self.draft,
            seed=self._random.randrange(2**32),
            behaviour=behaviour,
            link_config=self.link_config,
            find_peer_rank=self._find_peer_rank,
        )

    def _find_peer_rank(self, dp_group: str, dp_rank: int) -> SimEngine | None:
        for engine in self.live_engines:
            if (engine.dp_group, engine.dp_rank) == (dp_group, dp_rank):
                return engine
        return None

    def add_trainer(self, name: str = "trainer", *, lease_ms: int = 6000) -> SimTrainer:
        """A trainer; it begins to join. One that had the name is forgotten."""
        trainer = self.make_trainer(name, lease_ms=lease_ms)
        if name in self.trainers:
            self.superseded_boots.add(self.trainers[name].boot)
        self.trainers[name] = trainer
        trainer.start()
        return trainer

    def make_trainer(self, name: str, *, lease_ms: int = 6000) -> SimTrainer:
        """A trainer that has not begun to join."""
        return SimTrainer(
            name,
            process=Process(self.scheduler, self.network),
            boot=next(self._boots),
            group=GROUP,
            resend_ms=500.0,
            lease_ms=lease_ms,
            link_config=self.link_config,
            on_answer=self._on_answer,
        )

    def restart_engine(self, name: str) -> SimEngine:
        """The engine is killed, if it lives, and another life of it begins from nothing."""
        old = self.engines[name]
        if old.alive:
            old.kill()
        return self.add_engine(
            name,
            dp_group=old.dp_group,
            dp_rank=old.dp_rank,
            dp_size=old.dp_size,
            behaviour=old.behaviour,
        )

    def restart_broker(self) -> None:
        """The broker is gone at once, and a new one, knowing nothing, takes its address."""
        self.broker.close()
        self.broker_process.kill()
        self.broker = self._new_broker()

    def kill_broker(self) -> None:
        """The broker is gone without a word, until :meth:`start_broker`."""
        self.broker_process.kill()
        self.network.server()  # nobody listens there

    def start_broker(self) -> None:
        """A new one, knowing nothing, if there is none."""
        if not self.broker_process.alive:
            self.broker = self._new_broker()

    def heal(self) -> None:
        """From now on the network is honest, every link passes frames, nobody is stopped, calls
        succeed, and there is a broker."""
        self.start_broker()
        for process in self.processes():
            process.cont()
        self.network.faults = Faults(delay_ms=1.0)
        for route in [each.route for each in self.engines.values()]:
            self.network.heal(route)
        for route in [each.route for each in self.trainers.values()]:
            self.network.heal(route)
        for engine in self.engines.values():
            engine.behaviour.fail_rate.clear()
            engine.behaviour.fail_next.clear()
            engine.behaviour.garble_next = False
            for kind in list(engine.behaviour.hold):
                engine.release(kind)

    def processes(self) -> list[Process]:
        """All that there are, the last life of each: engines, trainers, the broker."""
        engines = [each.process for each in self.engines.values()]
        trainers = [each.process for each in self.trainers.values()]
        return [*engines, *trainers, self.broker_process]

    # -- time -------------------------------------------------------------------

    def check(self) -> None:
        """Look at every invariant, now."""
        for check in self.checks:
            check()

    def run_for(self, duration_ms: float) -> None:
        """Let so much time pass."""
        until_ms = self.now_ms + duration_ms
        self.run_until(lambda: False, within_ms=duration_ms)
        assert self.now_ms == until_ms

    def run_until(self, condition: Callable[[], bool], *, within_ms: float = 60_000.0) -> bool:
        """Run until the condition holds; False if it does not within the time."""

        def looked() -> bool:
            self.check()
            return condition()

        return self.scheduler.run_until(looked, within_ms=within_ms)

    def settle(self, *, within_ms: float = 60_000.0) -> bool:
        """Deliver until quiet: everybody alive has joined, nobody waits for anything."""
        return self.run_until(self.is_quiet, within_ms=within_ms)

    def is_quiet(self) -> bool:
        """Whether nothing is under way any more."""
        trainers = [each for each in self.trainers.values() if each.alive]
        if any(each.is_busy or each.unanswered for each in trainers):
            return False
        group = self.group
        if group is not None and (
            group.pause.state is not PauseState.RUNNING
            or group.update.state is not UpdateState.IDLE
        ):
            return False
        return all(
            engine.is_joined and engine.running_call is None and self.is_at_rest(engine)
            for engine in self.live_engines
        )

    def is_at_rest(self, engine: SimEngine) -> bool:
        """Nothing is armed while it runs; or a rank of its DP group is quarantined or missing."""
        session = engine.session
        peers = [each for each in self.live_engines if each.dp_group == engine.dp_group]
        partial = any(each.session.update.partial for each in peers)
        is_incomplete = len(peers) < engine.dp_size or partial
        if session.update.state is EngineUpdateState.ARMED:
            return is_incomplete  # what is armed may be armed anew
        if session.update.state is not EngineUpdateState.NONE:
            return False
        if session.phase == "weights_discarded":
            return False  # whoever was to bring its weights is gone; it is to know that
        return is_incomplete or session.pause.state is EnginePauseState.RUNNING

    def has_joined(self, names: Iterable[str] | None = None) -> bool:
        """Whether these engines (all that live) are members of the group at the broker."""
        group = self.group
        wanted = [each.name for each in self.live_engines] if names is None else list(names)
        if group is None:
            return False
        registry = group.registry
        known = {
            name: peer.boot
            for name, peer in registry.engines.items()
            if name in registry.ready() or registry.is_incomplete(name)
        }
        return all(
            known.get(name) == self.engines[name].boot and self.engines[name].is_joined
            for name in wanted
        )

    # -- inside -------------------------------------------------------------------

    def _new_broker(self) -> BrokerServer:
        boot = len(self.journals) + 1
        journal = MemoryJournal(boot, self.config, self.scheduler)
        self.journals.append(journal)
        process = self.broker_process = Process(self.scheduler, self.network)
        broker = BrokerServer(process.server(), process, self.config, boot=boot, journal=journal)
        broker.start()
        return broker

    def _on_answer(self, answer: Message) -> None:
        for each in self.on_answer:
            each(answer)
