"""Measures the lower limit of a pause and resume: bare ZeroMQ, with nothing around it.

A ROUTER socket takes the broker's place, and N DEALER sockets on N connections take the engines'.
The DEALERs are in another process, and answer every command at once. There are as many messages as
the bus sends, and they are frames of the bus.
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from typing import Final, Self

import zmq

from bus._runtime.zmq_transport import MAX_PEERS
from bus.messages import Ack, Message, PauseLocal, Resume, Step, codec
from lab.bench.process import write_answer

_PATIENCE_MS: Final = 30_000
_UPDATE_ID: Final = "u100-abcdef"
_BOOT: Final = 1 << 47
_HELLO: Final = b"hello"


def _frame(message: Message, *, sender: str, reply_to: int) -> bytes:
    """Encodes a message with sequence numbers as large as in a long run."""
    return codec.encode_frame(
        message, sender, _BOOT, 1000, reply_to=reply_to, group="bench", epoch=1
    )


def steps() -> list[tuple[bytes, bytes]]:
    """Returns a round's frames: the command of each step, and its ack."""
    commands: list[tuple[Message, Step]] = [
        (
            PauseLocal(_UPDATE_ID, "keep", True, 30_000, 300_000, 0, "keep", one_phase=True),
            Step.PAUSE_GLOBAL,
        ),
        (Resume(_UPDATE_ID), Step.RESUME),
    ]
    return [
        (
            _frame(command, sender="broker", reply_to=0),
            _frame(Ack(step, _UPDATE_ID, 0, 0, 0.123, "", ()), sender="engine-100", reply_to=1000),
        )
        for command, step in commands
    ]


class RawRouter:
    """The ROUTER's side of the exchange, in place of a broker.

    Attributes:
        address: where DEALERs connect.
        cpu_s: CPU time of this process in all rounds, in seconds.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_PEERS)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._commands = [command for command, _ in steps()]
        self._routes: list[bytes] = []
        self.cpu_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def welcome(self, engines: int) -> None:
        """Waits until this many DEALERs have sent their first message."""
        while len(self._routes) < engines:
            self._routes.append(self._socket.recv())
            self._socket.recv()

    async def round_ms(self) -> float:
        """Returns the time of two steps, each sent to all and acked by all. Blocks the loop."""
        send, recv, routes = self._socket.send, self._socket.recv, self._routes
        since_cpu_s, since_s = time.process_time(), time.perf_counter()
        for command in self._commands:
            for route in routes:
                send(route, zmq.SNDMORE)
                send(command)
            for _ in routes:
                recv()
                recv()
        took_ms = (time.perf_counter() - since_s) * 1000
        self.cpu_s += time.process_time() - since_cpu_s
        return took_ms


def raw_zmq(address: str, engines: int) -> None:
    """Runs the DEALERs' side, in place of engines, until stdin ends.

    Args:
        address: the ROUTER's address.
        engines: how many DEALERs to run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the reason in lab.bench.process
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_PEERS)
    acks = dict(steps())
    with selectors.DefaultSelector() as selector:
        for index in range(engines):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, f"engine-{index}#{_BOOT:x}".encode())
            socket.connect(address)
            socket.send(_HELLO)
            selector.register(int(socket.getsockopt(zmq.FD)), selectors.EVENT_READ, socket)
            _answer_all(socket, acks)  # nothing yet, but the descriptor reports only after a read
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        write_answer()
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    context.destroy(linger=0)
                    return
                _answer_all(key.data, acks)


def _answer_all(socket: zmq.Socket[bytes], acks: dict[bytes, bytes]) -> None:
    """Answers all waiting messages: the descriptor reports new events only after that."""
    while True:
        try:
            command = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        socket.send(acks[command])
