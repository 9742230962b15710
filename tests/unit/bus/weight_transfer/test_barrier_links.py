"""How the ends of a communicator find each other; who is turned away, and what ends it."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bus._weight_transfer import barrier_links
from bus._weight_transfer.allocation import RankAssignment
from bus._weight_transfer.barrier_links import Listener

LOCAL = "127.0.0.1"
LIMIT_S = 60.0
TOKEN = b"t" * barrier_links.TOKEN_BYTES


def test_who_waits_for_the_others_is_freed_when_the_sender_gives_up() -> None:
    """One of two came, and the root closes."""
    listener = Listener(LOCAL, TOKEN)
    with ThreadPoolExecutor(2) as threads:
        place = RankAssignment(1, 3, 0)
        root = threads.submit(listener.meet, place, "", timeout_s=LIMIT_S, silence_s=1)
        coming = threads.submit(
            barrier_links.connect,
            (LOCAL, listener.port),
            TOKEN,
            RankAssignment(1, 3, 1),
            "",
            timeout_s=LIMIT_S,
            silence_s=1,
        )
        while not listener.met:
            threading.Event().wait(0.01)
        listener.close()
        with pytest.raises(RuntimeError, match="it was closed meanwhile"):
            root.result(LIMIT_S)
        with pytest.raises(RuntimeError, match="the trainer's end is closed or gone"):
            coming.result(LIMIT_S)


def test_an_end_that_leaves_while_others_connect_ends_the_meeting() -> None:
    listener = Listener(LOCAL, TOKEN, first_ranks={"e0": 1})
    with ThreadPoolExecutor(1) as threads:
        root = threads.submit(
            listener.meet, RankAssignment(7, 3, 0), "", timeout_s=LIMIT_S, silence_s=1
        )
        with socket.create_connection((LOCAL, listener.port)) as bare:
            bare.sendall(barrier_links._HELLO.pack(TOKEN, 7, 1, 0))
            while not listener.met:
                threading.Event().wait(0.01)
        with pytest.raises(RuntimeError, match=r"e0, rank 1 \(\) left while others connected"):
            root.result(LIMIT_S)


def test_ends_that_never_come_are_named() -> None:
    listener = Listener(LOCAL, TOKEN, first_ranks={"e0": 1, "e1": 2})
    with pytest.raises(RuntimeError, match=r"e0, rank 1; e1, rank 2 did not come within 0\.1 s"):
        listener.meet(RankAssignment(7, 3, 0), "", timeout_s=0.1, silence_s=1)


@pytest.mark.parametrize(
    "hello",
    [
        barrier_links._HELLO.pack(b"x" * 16, 7, 1, 0),
        barrier_links._HELLO.pack(TOKEN, 8, 1, 0),
        barrier_links._HELLO.pack(TOKEN, 7, 0, 0),
        barrier_links._HELLO.pack(TOKEN, 7, 9, 0),
        barrier_links._HELLO.pack(TOKEN, 7, 1, 60_000),
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n",
    ],
    ids=["token", "communicator", "root", "rank", "greeting", "http"],
)
def test_a_stranger_is_turned_away_and_the_ends_still_meet(hello: bytes) -> None:
    listener = Listener(LOCAL, TOKEN)
    with ThreadPoolExecutor(2) as threads:
        root = threads.submit(
            listener.meet, RankAssignment(7, 2, 0), "", timeout_s=LIMIT_S, silence_s=1
        )
        with socket.create_connection((LOCAL, listener.port)) as stranger:
            stranger.sendall(hello)
            stranger.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it is hung up on"
        end = barrier_links.connect(
            (LOCAL, listener.port),
            TOKEN,
            RankAssignment(7, 2, 1),
            "",
            timeout_s=LIMIT_S,
            silence_s=1,
        )
        root.result(LIMIT_S).close()
        end.close()
