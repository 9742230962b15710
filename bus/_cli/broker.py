"""The command `wavebus broker`: runs a broker."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - an option's type, read by options_of
from typing import TYPE_CHECKING

import click

import bus.log
from bus._cli.options import (
    INSECURE_HELP,
    NamedPath,
    announce,
    checked,
    log_options,
    option,
    options_of,
    run_until_stopped,
)
from bus._ids import new_boot
from bus._journal.writer import DEFAULT_BYTES, LEAST_BYTES, MOST_BYTES, JournalWriter
from bus._keys import INSECURE_VARIABLE, read_keyring
from bus._net import check_address
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Note
from bus._runtime.clock import AsyncioScheduler
from bus._runtime.zmq_transport import ZmqServer
from bus._settings import DEFAULT_BROKER
from bus.errors import UsageError

if TYPE_CHECKING:
    from bus._runtime.broker_server import BrokerServer


@dataclass(frozen=True)
class BrokerPlan:
    """Options of ``wavebus broker``."""

    listen: str = option(
        DEFAULT_BROKER,
        "Where to listen; port * takes any free one.  [env: WAVEBUS_LISTEN]",
        envvar="WAVEBUS_LISTEN",
        metavar="ADDRESS",
        callback=checked(check_address),
    )
    heartbeat_ms: int = option(
        1000, "Interval between the heartbeats of a peer, in ms.", min=10, max=60_000
    )
    peer_timeout_ms: int = option(
        5000, "Silence after which a peer is lost; at least three heartbeats.", min=50, max=600_000
    )
    step_timeout_ms: int = option(
        300_000,
        "How long a live engine may take for one step of a pause or update.",
        min=100,
        max=86_400_000,
    )
    curve_keys: Path | None = option(
        None,
        "A folder with broker.secret, and the public keys of all peers in authorized/; read anew "
        "on SIGHUP. Only peers with one of these keys can connect.  [env: WAVEBUS_CURVE_KEYS]",
        type=NamedPath(file_okay=False),
        envvar="WAVEBUS_CURVE_KEYS",
    )
    insecure: bool = option(False, INSECURE_HELP, envvar=INSECURE_VARIABLE)
    journal: Path | None = option(
        None,
        "Record every control message here, for `wavebus journal`, `why`, `replay` and `trace`; "
        "a commit is recorded before any engine serves it.  [env: WAVEBUS_JOURNAL]",
        envvar="WAVEBUS_JOURNAL",
        metavar="DIR",
        type=NamedPath(file_okay=False),
    )
    journal_bytes: int = option(
        DEFAULT_BYTES,
        "Size limit of the journal; beyond it the oldest file is deleted.  "
        "[env: WAVEBUS_JOURNAL_BYTES]",
        envvar="WAVEBUS_JOURNAL_BYTES",
        min=LEAST_BYTES,
        max=MOST_BYTES,
    )


@click.command()
@options_of(BrokerPlan)
@log_options
def broker(plan: BrokerPlan) -> None:
    """Run the broker until SIGINT or SIGTERM.

    Prints its address on stdout once it listens, and logs to stderr: which peers join, and each
    step of a pause or update with its slowest engine. If the broker stops, engines keep generating,
    and peers join the next broker at its address.
    """
    if plan.peer_timeout_ms < 3 * plan.heartbeat_ms:
        raise UsageError(
            f"--peer-timeout-ms={plan.peer_timeout_ms}: must be at least three heartbeats "
            f"({3 * plan.heartbeat_ms})"
        )
    keyring = read_keyring(plan.curve_keys) if plan.curve_keys is not None else None
    config = BrokerConfig(
        heartbeat_ms=plan.heartbeat_ms,
        peer_timeout_ms=plan.peer_timeout_ms,
        step_timeout_ms=plan.step_timeout_ms,
    )

    # Imported here, because the help text needs no state machine.
    from bus._runtime.broker_server import BrokerServer  # noqa: PLC0415

    async def serve(stop: asyncio.Event) -> None:
        log = bus.log.logger()
        scheduler = AsyncioScheduler()
        transport = ZmqServer(plan.listen, keyring=keyring, insecure=plan.insecure)
        roles = keyring.roles() if keyring else None
        boot = new_boot()
        recorder = None
        if plan.journal is not None:
            recorder = JournalWriter(
                plan.journal,
                limit_bytes=plan.journal_bytes,
                boot=boot,
                config=config,
                keys=roles,
                scheduler=scheduler,
                on_failure=lambda error: log.error("journal_failed", reason=str(error)),
                on_recovery=lambda lost: log.warning("journal_recovered", records_lost=lost),
            )
        server = BrokerServer(transport, scheduler, config, roles, boot=boot, journal=recorder)
        server.start()
        if plan.curve_keys is not None:
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, _reload_keys, plan.curve_keys, transport, server
            )
        keys = len(roles) if roles is not None else None
        log.info("broker_listening", address=transport.address, keys=keys)
        announce(transport.address)
        await stop.wait()
        server.close()
        log.info("broker_stopped")

    run_until_stopped(serve)


def _reload_keys(folder: Path, transport: ZmqServer, server: BrokerServer) -> None:
    """Reads the broker's key folder again, and applies it to the running broker.

    If a file is wrong, logs the error and keeps the old keys.
    """
    log = bus.log.logger()
    try:
        keyring = read_keyring(folder)
    except UsageError as error:
        bus.log.write(log, Note("keys_not_reloaded", "error", {"detail": str(error)}))
        return
    transport.keyring = keyring
    server.rekey(keyring.roles())
    log.info("keys_reloaded", keys=len(keyring.authorized))
