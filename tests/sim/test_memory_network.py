"""The network in memory loses and doubles frames as it is told, and repeatably."""

from __future__ import annotations

from tests.sim.clock import SimScheduler
from tests.sim.memory_network import Faults, MemoryNetwork


def carried(faults: Faults, seed: int = 1) -> tuple[list[bytes], dict[str, int]]:
    """What arrives of a hundred frames."""
    clock = SimScheduler()
    network = MemoryNetwork(clock, seed=seed, faults=faults)
    arrived: list[bytes] = []
    network.server().listen(lambda _route, frame, _user: arrived.append(frame))
    client = network.client(b"e0")
    for count in range(100):
        client.send(bytes([count]))
    clock.run_for(10_000.0)
    return arrived, network.counts


def test_an_honest_network_delivers_everything_in_order() -> None:
    """Also when frames take their time."""
    arrived, counts = carried(Faults(delay_ms=5.0, jitter_ms=50.0))
    assert arrived == [bytes([count]) for count in range(100)]
    assert counts["delivered"] == 100


def test_a_bad_network_drops_doubles_and_disorders() -> None:
    """And counts it."""
    arrived, counts = carried(Faults(drop=0.2, duplicate=0.2, jitter_ms=50.0, reorder=True))
    assert counts["dropped"] > 5
    assert counts["duplicated"] > 5
    assert arrived != sorted(arrived)
    assert len(arrived) == 100 - counts["dropped"] + counts["duplicated"]


def test_one_seed_is_one_course_of_events() -> None:
    """And another seed another one."""
    faults = Faults(drop=0.2, duplicate=0.2, jitter_ms=50.0, reorder=True)
    assert carried(faults) == carried(faults)
    assert carried(faults) != carried(faults, seed=2)


def test_a_link_can_be_cut_in_one_direction() -> None:
    """Until it is healed, by another connection; what was on its way then is lost, too."""
    clock = SimScheduler()
    network = MemoryNetwork(clock, faults=Faults(delay_ms=1.0))
    seen: list[bytes] = []
    routes = [b"e0"]
    server, client = network.server(), network.client(b"e0")

    def receive(route: bytes, frame: bytes, _user: str) -> None:
        routes.append(route)
        seen.append(frame)

    server.listen(receive)
    client.listen(seen.append)

    def both(frame: bytes) -> None:
        client.send(b"up " + frame)
        clock.run_for(5.0)
        server.send([routes[-1]], b"down " + frame)
        clock.run_for(5.0)

    network.cut(b"e0", down=False)
    both(b"1")
    network.heal(b"e0")
    network.cut(b"e0", up=False)
    both(b"2")
    network.heal(b"e0")
    both(b"3")
    assert seen == [b"down 1", b"up 2", b"up 3", b"down 3"]
    assert routes == [b"e0", b"e0/1", b"e0/2"]
    assert server.send([b"e0"], b"to the first connection") == [b"e0"]
