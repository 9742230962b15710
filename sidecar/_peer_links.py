"""Direct links between a DP group's sidecars, to end a pause without the broker.

When the broker is gone and a pause lease is over, the ranks vote over these links. Each sidecar has
a ROUTER socket of its own, and a DEALER socket to each peer rank. The broker sends the peer ranks'
addresses (PEER_RANKS). The links carry only LEASE_VOTE. A sidecar accepts a vote only for the rank
of its sender, which it identifies by name, life (boot) and, if the broker uses keys, by key. Late
votes are dropped: those of an earlier life of the rank, and those that a later one has overtaken.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import bus.log
from bus._keys import Key, Keyring, Security
from bus._net import is_loopback
from bus._runtime.peer import route_of
from bus._runtime.zmq_transport import ZmqClient, ZmqServer
from bus.errors import DecodeError, UsageError
from bus.messages import Envelope, LeaseVote, codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.messages import PeerRank, PeerRanks


class PeerLinks:
    """Connects one rank's sidecar to the sidecars of its peer ranks.

    Args:
        name, boot, group, dp_group, dp_rank: this rank's identity, as on the bus.
        broker: the broker's address; peer ranks are reached over the same interface.
        security: this rank's secret key; without one, the links are not encrypted.
        on_vote: receives each vote of a peer rank, decoded and checked.

    Attributes:
        address: where peer ranks reach this rank. The rank's JOIN carries it to the broker.

    Raises:
        UsageError: no port is free to listen on.
    """

    def __init__(
        self,
        name: str,
        boot: int,
        *,
        group: str,
        dp_group: str,
        dp_rank: int,
        broker: str,
        security: Security,
        on_vote: Callable[[LeaseVote], None],
    ) -> None:
        self._name, self._boot, self._group = name, boot, group
        self._dp_group, self._dp_rank = dp_group, dp_rank
        self._security = security
        self._on_vote = on_vote
        self._peers: dict[int, tuple[PeerRank, ZmqClient]] = {}
        self._seq = 0
        self._seen: dict[int, tuple[int, int]] = {}  # by rank: the boot and number of its last vote
        self._log = bus.log.logger(peer=name, group=group)
        own = security.own
        self._server = ZmqServer(
            f"tcp://{_own_address(broker)}:*",
            keyring=Keyring(own, {}) if own else None,
            insecure=security.insecure,
        )
        self.address = self._server.address
        self._server.listen(self._on_frame)

    def connect_peers(self, message: PeerRanks) -> None:
        """Connects to peer ranks, and replaces links whose address or key has changed.

        Args:
            message: all ranks of the DP group, as the broker lists them; this rank is skipped.
        """
        peers = {each.dp_rank: each for each in message.peers if each.dp_rank != self._dp_rank}
        for rank in [r for r, (known, _) in self._peers.items() if peers.get(r) != known]:
            self._peers.pop(rank)[1].close()
        for rank, peer in peers.items():
            if rank not in self._peers and peer.address:
                self._connect(rank, peer)
        if self._security.own is not None:
            keys = {each.key: Key(each.name, "engine", each.key) for each in peers.values()}
            self._server.keyring = Keyring(self._security.own, keys)

    def _connect(self, rank: int, peer: PeerRank) -> None:
        security = Security(self._security.own, peer.key, insecure=self._security.insecure)
        try:
            client = ZmqClient(peer.address, route_of(self._name, self._boot), security)
        except UsageError as error:
            self._log.warning("peer_rank_unreachable", peer_rank=peer.name, detail=str(error))
            return
        client.listen(lambda _frame: None)  # peer ranks answer to this rank's ROUTER
        self._peers[rank] = (peer, client)

    def send(self, vote: LeaseVote, ranks: tuple[int, ...]) -> None:
        """Sends a vote to the given ranks, without those that are not connected.

        Args:
            vote: this rank's vote.
            ranks: the numbers of the ranks that are to receive it.
        """
        for rank in ranks:
            if rank in self._peers:
                self._seq += 1
                self._peers[rank][1].send(
                    codec.encode_frame(vote, self._name, self._boot, self._seq, group=self._group)
                )

    def close(self) -> None:
        """Closes all links, so that no more votes arrive."""
        self._server.close()
        for _, client in self._peers.values():
            client.close()
        self._peers.clear()

    def _on_frame(self, _route: bytes, frame: bytes, user: str) -> None:
        try:
            envelope, message = codec.decode(frame)
        except DecodeError as error:
            self._log.warning("bad_frame", field=error.field, detail=str(error))
            return
        if not isinstance(message, LeaseVote) or not self._known(envelope, message, user):
            self._log.warning("forbidden", peer=envelope.sender, kind=envelope.kind)
            return
        boot, seq = self._seen.get(message.dp_rank, (0, 0))
        if envelope.boot == boot and envelope.seq <= seq:
            return
        self._seen[message.dp_rank] = (envelope.boot, envelope.seq)
        self._on_vote(message)

    def _known(self, envelope: Envelope, vote: LeaseVote, user: str) -> bool:
        peer, _ = self._peers.get(vote.dp_rank, (None, None))
        return (
            peer is not None
            and (envelope.group, vote.dp_group) == (self._group, self._dp_group)
            and (envelope.sender, user) == (peer.name, peer.key)
            and envelope.boot == (peer.boot or envelope.boot)
        )


def _own_address(broker: str) -> str:
    """Returns this host's address towards the broker; loopback if there is no route."""
    if is_loopback(broker):
        return "127.0.0.1"
    parts = urlsplit(broker)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, proto, _, where = found[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)  # sends nothing
            host = str(probe.getsockname()[0])
    except OSError:  # the broker is unreachable, so no peer rank is known
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
