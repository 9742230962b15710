"""What a join costs the broker does not grow with the number of engines that are there.

Counts of frames, bytes and executed lines, not times.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus._protocol.core.effects import Note, Send
from bus._protocol.group.routing import SETTLES_ABOVE
from bus.messages import Heartbeat, Join, RoutesChange, WaitEngines, codec
from tests.unit.bus._builders import TRAINER_JOIN, engine_join
from tests.unit.bus.protocol.broker.test_broker import Bench

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from bus._protocol.core.effects import Effect

FEW, MANY = 64, 1024
LIMIT = 1.5


class Storm(Bench):
    """Engines that join within a second, with two watchers and a trainer that waits for all.

    ``cost`` counts what the broker does: frames and bytes that it sends, bytes of its log, and
    lines of Python that it executes.
    """

    def __init__(self, engines: int) -> None:
        super().__init__()
        self.engines = engines
        self.cost: Counter[str] = Counter()
        self.changes: list[RoutesChange] = []
        for watcher in ("w0", "w1"):
            self.say(watcher, Join("observer", "h", 1, None, None), group="")
        self.say("t", TRAINER_JOIN)
        self.epoch = self.broker.groups["policy"].epoch
        self.say("t", WaitEngines(engines, 60_000))

    def run(self, *, closed: bool) -> Counter[str]:
        """All join, and beat once; returns the cost of each engine.

        Engines that boot ``closed`` open their admission with their heartbeat.
        """
        for index in range(self.engines):
            name = f"engine-{index:04}"
            join = engine_join(dp_group=name)
            assert join.engine is not None
            facts = replace(join.engine, endpoint=f"http://host:{index}", closed=closed)
            self._count(name, replace(join, engine=facts))
        for index in range(self.engines):
            self._count(f"engine-{index:04}", Heartbeat("running", 0, 0, ""))
        self.cost.update(self._price(self.settle()))
        return Counter({what: count / self.engines for what, count in self.cost.items()})

    def _count(self, sender: str, message: Join | Heartbeat) -> None:
        self.now_ms += 1000.0 / self.engines
        lines = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal lines
            lines += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            effects = self.say(sender, message)
            if self.broker.next_deadline_ms() <= self.now_ms:
                effects += self.broker.tick(self.now_ms)
        finally:
            sys.settrace(before)
        self.cost["lines"] += lines
        self.cost.update(self._price(effects))

    def _price(self, effects: list[Effect]) -> Counter[str]:
        price: Counter[str] = Counter()
        for effect in effects:
            if isinstance(effect, Note):
                price["log bytes"] += len(json.dumps([effect.event, effect.fields]))
                continue
            assert isinstance(effect, Send)
            size = len(codec.encode_frame(effect.message, "broker", 1, 1, group="policy"))
            price["frames"] += len(effect.routes)
            price["bytes"] += size * len(effect.routes)
            if isinstance(effect.message, RoutesChange):
                self.changes.append(effect.message)
        return price


def check(*, closed: bool) -> None:
    few, many = Storm(FEW).run(closed=closed), (storm := Storm(MANY)).run(closed=closed)
    for what, count in few.items():
        assert many[what] <= LIMIT * count, (what, count, many[what])
    names = [route.engine for change in storm.changes for route in change.came]
    assert sorted(names) == [f"engine-{index:04}" for index in range(MANY)]
    assert len(storm.changes) <= SETTLES_ABOVE + 2 + 1000 / 100 + 2


def test_a_join_costs_as_much_among_a_thousand_engines_as_among_64() -> None:
    """Each is named once to each watcher and in the log, in one message for each tenth second."""
    check(closed=False)


def test_an_engine_that_boots_closed_costs_no_more_when_it_opens() -> None:
    """As all engines do that a supervisor starts."""
    check(closed=True)
