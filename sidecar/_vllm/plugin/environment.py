"""Environment variables that the plugin reads inside vLLM's processes.

A supervising sidecar sets them for its server. If you start vLLM yourself, set them for every rank
of the DP group. The sidecar reads the variables for broker, group and DP group, too.

======================== ===========================================================
variable                 meaning
======================== ===========================================================
WAVEBUS_DP_COORDINATOR   ``bus``: the bus's DP coordinator replaces vLLM's;
                         ``vllm`` (default): vLLM's own is used
WAVEBUS_BROKER           the broker to which the DP coordinator connects
WAVEBUS_GROUP            the group on the bus (default ``policy``)
WAVEBUS_DP_GROUP         the DP group's name on the bus; needed with ``bus``
WAVEBUS_KEY              the DP coordinator's secret key file (role engine), for a broker with keys
WAVEBUS_BROKER_KEY       that broker's public key file
WAVEBUS_INSECURE         ``1``: the DP coordinator may go beyond loopback without keys
WAVEBUS_CORE_GUARD       ``0``: leave vLLM's pause and resume as they are
WAVEBUS_CORE_PAGES       a folder for the cores' status pages
WAVEBUS_BOOT_CLOSED      ``1``: cores boot with closed admission; a sidecar that has joined opens it
WAVEBUS_CLOSED_ANSWER    ``0``: a closed API server answers with no tokens, not with HTTP 503
WAVEBUS_TRUST_KV_CONNECTORS     names of unknown KV connectors that return no KV of older weights,
                         separated by commas
WAVEBUS_DP_COORDINATOR_PID      set by the plugin: pid of the DP coordinator that this rank started
======================== ===========================================================
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from bus._settings import DEFAULT_BROKER

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
    """The broker and the DP group of a DP coordinator.

    Attributes:
        broker: the broker's address.
        group: the group on the bus.
        dp_group: the DP group's name on the bus.
    """

    broker: str
    group: str
    dp_group: str

    def variables(self) -> dict[str, str]:
        """Returns environment variables that make vLLM start a DP coordinator here."""
        return {
            DP_COORDINATOR: "bus",
            BROKER: self.broker,
            GROUP: self.group,
            DP_GROUP: self.dp_group,
        }


def dp_coordinator(env: Mapping[str, str] = os.environ) -> DpCoordinator:
    """Returns which DP coordinator the environment asks for: ``vllm`` (default) or ``bus``.

    Raises:
        ValueError: the variable has another value.
    """
    chosen = env.get(DP_COORDINATOR, "vllm")
    if chosen not in ("vllm", "bus"):
        raise ValueError(f"{DP_COORDINATOR}={chosen} is not valid: set it to vllm or bus")
    return cast("DpCoordinator", chosen)


def bus_address(env: Mapping[str, str] = os.environ) -> BusAddress:
    """Returns the address of the DP coordinator, from the environment variables.

    Raises:
        ValueError: the DP group has no name.
    """
    dp_group = env.get(DP_GROUP, "")
    if not dp_group:
        raise ValueError(
            f"{DP_COORDINATOR}=bus needs {DP_GROUP}, which is not set: give all ranks of the DP "
            "group, and their sidecars (--dp-group), the same name"
        )
    return BusAddress(
        broker=env.get(BROKER, DEFAULT_BROKER), group=env.get(GROUP, "policy"), dp_group=dp_group
    )


def trusted_kv_connectors(env: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Returns the names of unknown KV connectors that the user allows during updates."""
    return frozenset(name.strip() for name in env.get(TRUST_KV_CONNECTORS, "").split(","))


def memory_folder() -> Path:
    """Returns a folder for small files that are written often; on tmpfs if possible.

    Other programs use the folder, too: create a folder of your own in it.
    """
    shared = Path("/dev/shm")  # noqa: S108 - see above
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
