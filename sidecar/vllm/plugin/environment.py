"""Environment variables that the plugin reads inside vLLM's processes.

A supervising sidecar sets them for its server; who runs vLLM otherwise sets them for
every rank of the DP group. Broker, group and DP group are the sidecar's own variables.

======================== ===========================================================
variable                 meaning
======================== ===========================================================
WAVEBUS_DP_COORDINATOR   ``bus``: the DP coordinator stands in for vLLM's DP coordinator;
                         ``vllm`` (default): it does not
WAVEBUS_BROKER           the broker that the DP coordinator asks
WAVEBUS_GROUP            the group on the bus (default ``policy``)
WAVEBUS_DP_GROUP         the DP group's name on the bus; needed with ``bus``
WAVEBUS_KEY              the DP coordinator's secret key file (role engine), for a broker with keys
WAVEBUS_BROKER_KEY       and that broker's public one
WAVEBUS_INSECURE         ``1``: the DP coordinator goes beyond loopback without keys
WAVEBUS_CORE_GUARD       ``0``: leave vLLM's pause and resume as they are
WAVEBUS_CORE_PAGES       a folder for the cores' status pages
WAVEBUS_BOOT_CLOSED      ``1``: cores boot with closed admission; a sidecar that has joined opens it
WAVEBUS_CLOSED_ANSWER    ``0``: a closed API server answers with no tokens, not with HTTP 503
WAVEBUS_TRUST_KV_CONNECTORS     unknown KV connectors that give no KV of older weights, by name,
                         with commas between them
WAVEBUS_DP_COORDINATOR_PID      set by the plugin: the DP coordinator that this rank started
======================== ===========================================================
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from bus.settings import DEFAULT_BROKER

if TYPE_CHECKING:
    from collections.abc import Mapping

DpCoordinator: TypeAlias = Literal["vllm", "bus"]

DP_COORDINATOR: Final = "WAVEBUS_DP_COORDINATOR"
BROKER: Final = "WAVEBUS_BROKER"
GROUP: Final = "WAVEBUS_GROUP"
DP_GROUP: Final = "WAVEBUS_DP_GROUP"
CORE_GUARD: Final = "WAVEBUS_CORE_GUARD"
CLOSED_ANSWER: Final = "WAVEBUS_CLOSED_ANSWER"
CORE_PAGES: Final = "WAVEBUS_CORE_PAGES"
BOOT_CLOSED: Final = "WAVEBUS_BOOT_CLOSED"
TRUST_KV_CONNECTORS: Final = "WAVEBUS_TRUST_KV_CONNECTORS"
DP_COORDINATOR_PID: Final = "WAVEBUS_DP_COORDINATOR_PID"


@dataclass(frozen=True, slots=True)
class BusAddress:
    """A DP coordinator's place on the bus."""

    broker: str
    group: str
    dp_group: str

    def variables(self) -> dict[str, str]:
        """Return the variables that make a vLLM start a DP coordinator there."""
        return {
            DP_COORDINATOR: "bus",
            BROKER: self.broker,
            GROUP: self.group,
            DP_GROUP: self.dp_group,
        }


def dp_coordinator(env: Mapping[str, str] = os.environ) -> DpCoordinator:
    """Return who coordinates the DP group.

    Raises:
        ValueError: the variable has another value.
    """
    chosen = env.get(DP_COORDINATOR, "vllm")
    if chosen not in ("vllm", "bus"):
        raise ValueError(f"{DP_COORDINATOR}={chosen}: it is vllm or bus")
    return cast("DpCoordinator", chosen)


def bus_address(env: Mapping[str, str] = os.environ) -> BusAddress:
    """Return the DP coordinator's place on the bus.

    Raises:
        ValueError: the DP group has no name.
    """
    dp_group = env.get(DP_GROUP, "")
    if not dp_group:
        raise ValueError(
            f"{DP_COORDINATOR}=bus: {DP_GROUP} is missing; give all ranks of the DP group, "
            "and their sidecars (--dp-group), the same name"
        )
    return BusAddress(
        broker=env.get(BROKER, DEFAULT_BROKER), group=env.get(GROUP, "policy"), dp_group=dp_group
    )


def trusted_kv_connectors(env: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the unknown KV connectors that may stay in an engine that is updated."""
    return frozenset(name.strip() for name in env.get(TRUST_KV_CONNECTORS, "").split(","))


def memory_folder() -> Path:
    """Return a folder for small files that are written often; make your own folder in it."""
    shared = Path("/dev/shm")  # noqa: S108 - see above
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
