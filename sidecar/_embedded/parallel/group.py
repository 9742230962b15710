"""Collectives between the ranks of a DP group, by gloo.

The ranks find each other through a store of torch at the address ``master``. Their process group is
not torch's default one, which other code in this process may use.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed

from bus._net import local_address
from bus.errors import EngineDead, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from sidecar._embedded.parallel.options import DataParallel
    from sidecar._lease_agreement import Store

T = TypeVar("T")

# torch's type stubs have half of it.
dist: Final[Any] = torch.distributed
# Longer than any wait: the watchdog detects a rank that hangs, and a dead rank breaks the
# connection.
_COLLECTIVE_TIMEOUT: Final = timedelta(hours=24)


class Rendezvous:
    """Lets the ranks of a DP group find each other when they start.

    Every method blocks, so call it in a thread of its own.

    Args:
        options: this rank's options.

    Raises:
        EngineError: also from every method: the other ranks did not come in time, or differ.
    """

    def __init__(self, options: DataParallel) -> None:
        self._options = options
        host, port = options.address
        self._store = self._bounded(
            lambda: dist.TCPStore(
                host,
                port,
                options.size,
                is_master=options.rank == 0,
                timeout=timedelta(seconds=options.join_timeout_s),
                wait_for_workers=False,
            )
        )

    def check(self, facts: dict[str, object]) -> None:
        """Checks that this rank is configured as rank 0 is.

        Args:
            facts: what must be equal on all ranks, by name. Rank 0 publishes its facts, and the
                others compare theirs.
        """
        options = self._options
        if options.rank == 0:
            self.publish("facts", facts)
        own: dict[str, object] = json.loads(json.dumps(facts))
        for name, value in self.wait_for("facts").items():
            if own.get(name) != value:
                raise EngineError(
                    f"{name} is {own.get(name)!r} on rank {options.rank} of DP group "
                    f"{options.group}, but {value!r} on rank 0: give all ranks the same"
                )

    def publish(self, key: str, value: dict[str, Any]) -> None:
        """Publishes a value for all ranks under a key, which can be used once."""
        self._bounded(lambda: self._store.set(f"{self._options.group}/{key}", json.dumps(value)))

    def wait_for(self, key: str) -> dict[str, Any]:
        """Waits until a value is published under a key, and returns it."""
        text = self._bounded(lambda: self._store.get(f"{self._options.group}/{key}"))
        value: dict[str, Any] = json.loads(text)
        return value

    def lease_store(self) -> Store:
        """Returns a new connection to the store, for the votes that end a pause."""
        store: Store = self._bounded(
            lambda: dist.PrefixStore(self._options.group, self._store.clone())
        )
        return store

    def join(self) -> RankGroup:
        """Waits for all ranks, and returns their collectives."""
        options = self._options
        host, port = options.address
        store = dist.PrefixStore(f"{options.group}/gloo", self._store)
        gloo = dist.ProcessGroupGloo

        def make() -> object:
            own = host if options.rank == 0 else local_address(host, port)
            settings = gloo._Options()  # noqa: SLF001 - torch has no other way to choose the device
            settings._timeout = timedelta(seconds=options.join_timeout_s)  # noqa: SLF001 - same
            settings._devices = [gloo.create_device(hostname=own)]  # noqa: SLF001 - same
            return gloo(store, options.rank, options.size, settings)

        return RankGroup(self._bounded(make), options.group, options.rank, options.size)

    def _bounded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (RuntimeError, ValueError, OSError) as error:
            options = self._options
            raise EngineError(
                f"rank {options.rank} of DP group {options.group} can't meet the others at "
                f"{options.master}: {_first_line(error)}"
            ) from error


class RankGroup:
    """Carries out collectives with the other ranks of a DP group.

    Each call blocks until all ranks have made it.

    Args:
        gloo: torch's process group of the ranks.
        name: the DP group's name.
        rank: this rank.
        size: how many ranks there are.

    Raises:
        EngineDead: from every method: a rank has gone, and the others can't continue without it.
    """

    def __init__(self, gloo: Any, name: str, rank: int, size: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._gloo = gloo
        gloo.set_timeout(_COLLECTIVE_TIMEOUT)

    def sums(self, *numbers: int) -> list[int]:
        """Returns the sum over all ranks for each of the numbers."""
        total = torch.tensor(numbers)
        self._wait(lambda: self._gloo.allreduce([total], dist.AllreduceOptions()))
        summed: list[int] = total.tolist()
        return summed

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchanges rows with all ranks, and returns the received rows.

        The given rows are in the order of the ranks to which they go, and the returned rows in that
        of the ranks from which they come.

        Args:
            rows: the rows for all ranks.
            sent: how many rows go to each rank.
            received: how many rows come from each rank.
        """
        given = rows.contiguous()
        taken = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        self._wait(
            lambda: self._gloo.alltoall_base(
                taken, given, list(received), list(sent), dist.AllToAllOptions()
            )
        )
        return taken

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise EngineDead(
                f"rank {self.rank} of DP group {self.name} has lost a peer rank, and can't step "
                f"without: {_first_line(error)}"
            ) from error


class GroupExchange:
    """Sends tokens' hidden states to the ranks of their experts, and returns the results.

    Each rank holds one block of successive experts; the blocks are of nearly equal size. Implements
    :class:`sidecar._embedded.qwen3.Exchange` by three all-to-all exchanges: the counts of rows, the
    rows, and the results.

    Args:
        group: the ranks that share the experts.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._sent: list[int] = []
        self._received: list[int] = []

    def own(self, experts: int) -> range:
        """Returns which of ``experts`` experts this rank computes."""
        return self._block(self._group.rank, experts)

    def dispatch(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[list[int]]]:
        """Sends rows to the ranks of their experts; see :meth:`Exchange.dispatch`."""
        group, experts = self._group, len(counts)
        blocks = [self._block(rank, experts) for rank in range(group.size)]
        own = len(blocks[group.rank])
        swapped = group.swap(
            torch.tensor(counts), [len(block) for block in blocks], [own] * group.size
        )
        of_source: list[list[int]] = swapped.view(group.size, own).tolist()
        self._sent = [sum(counts[block.start : block.stop]) for block in blocks]
        self._received = [sum(source) for source in of_source]
        return self._swap(rows, self._sent, self._received), of_source

    def combine(self, results: Tensor) -> Tensor:
        """Sends the results back to the rows' ranks; see :meth:`Exchange.combine`."""
        return self._swap(results, self._received, self._sent)

    def _swap(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        # As bytes, because gloo does not support every dtype.
        return self._group.swap(rows.view(torch.uint8), sent, received).view(rows.dtype)

    def _block(self, rank: int, experts: int) -> range:
        size = self._group.size
        return range(experts * rank // size, experts * (rank + 1) // size)


def _first_line(error: Exception) -> str:
    """Returns an error's first line, without gloo's stack traces and advice."""
    text = str(error).strip()
    return text.splitlines()[0].split(". This is typically")[0] if text else type(error).__name__
