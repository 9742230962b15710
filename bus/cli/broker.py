"""`wavebus broker`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

import bus.log
from bus.cli.options import configure_log, insecure_option, log_options, run_until_stopped
from bus.errors import UsageError
from bus.ids import new_boot
from bus.journal.writer import DEFAULT_BYTES, LEAST_BYTES, MOST_BYTES, JournalWriter
from bus.keys import read_keyring
from bus.protocol.broker.config import BrokerConfig
from bus.protocol.core.effects import Note
from bus.runtime.clock import AsyncioScheduler
from bus.runtime.zmq_transport import ZmqServer
from bus.settings import DEFAULT_BROKER

if TYPE_CHECKING:
    from bus.runtime.broker_server import BrokerServer


@click.command()
@click.option(
    "--listen",
    envvar="WAVEBUS_LISTEN",
    default=DEFAULT_BROKER,
    show_default=True,
    metavar="ADDRESS",
    help="Where to listen; port * takes any free one.  [env: WAVEBUS_LISTEN]",
)
@click.option(
    "--heartbeat-ms",
    type=click.IntRange(10, 60_000),
    default=1000,
    show_default=True,
    help="How often every peer says that it lives.",
)
@click.option(
    "--peer-timeout-ms",
    type=click.IntRange(50, 600_000),
    default=5000,
    show_default=True,
    help="Silence after which a peer is lost; at least three heartbeats.",
)
@click.option(
    "--step-timeout-ms",
    type=click.IntRange(100, 86_400_000),
    default=300_000,
    show_default=True,
    help="How long an engine that lives may take for one step of a pause or update.",
)
@click.option(
    "--curve-keys",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="WAVEBUS_CURVE_KEYS",
    default=None,
    help="A folder with broker.secret, and the public keys of all peers in authorized/; read anew "
    "on SIGHUP. Nobody else is let in then.  [env: WAVEBUS_CURVE_KEYS]",
)
@insecure_option
@click.option(
    "--journal",
    envvar="WAVEBUS_JOURNAL",
    default=None,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Record every control message here, for `wavebus journal`, `why`, `replay` and `trace`; "
    "a commit is recorded before anybody serves it.  [env: WAVEBUS_JOURNAL]",
)
@click.option(
    "--journal-bytes",
    envvar="WAVEBUS_JOURNAL_BYTES",
    type=click.IntRange(LEAST_BYTES, MOST_BYTES),
    default=DEFAULT_BYTES,
    show_default=True,
    help="What the journal takes at most; beyond it the oldest of its files goes.  "
    "[env: WAVEBUS_JOURNAL_BYTES]",
)
@log_options
def broker(
    listen: str,
    heartbeat_ms: int,
    peer_timeout_ms: int,
    step_timeout_ms: int,
    curve_keys: Path | None,
    insecure: bool,
    journal: Path | None,
    journal_bytes: int,
    log_level: str,
    log_format: str,
) -> None:
    """Run the broker until SIGINT or SIGTERM.

    It prints its address on stdout once it listens. Its log, on stderr, tells every
    update: who joined, pause asked, local and global, chunks, commit, resume, and who
    was slowest. Engines go on generating when it stops; peers find the next one.
    """
    configure_log(log_level, log_format)
    if peer_timeout_ms < 3 * heartbeat_ms:
        raise UsageError(
            f"--peer-timeout-ms={peer_timeout_ms}: must be at least three heartbeats "
            f"({3 * heartbeat_ms})"
        )
    keyring = read_keyring(curve_keys) if curve_keys is not None else None
    config = BrokerConfig(
        heartbeat_ms=heartbeat_ms,
        peer_timeout_ms=peer_timeout_ms,
        step_timeout_ms=step_timeout_ms,
    )

    # A help text needs none of the machines.
    from bus.runtime.broker_server import BrokerServer  # noqa: PLC0415

    async def serve(stop: asyncio.Event) -> None:
        log = bus.log.logger()
        scheduler = AsyncioScheduler()
        transport = ZmqServer(listen, keyring=keyring, insecure=insecure)
        roles = keyring.roles() if keyring else None
        boot = new_boot()
        recorder = None
        if journal is not None:
            recorder = JournalWriter(
                journal,
                limit_bytes=journal_bytes,
                boot=boot,
                config=config,
                keys=roles,
                scheduler=scheduler,
                on_failure=lambda error: log.error("journal_failed", reason=str(error)),
                on_recovery=lambda lost: log.warning("journal_recovered", records_lost=lost),
            )
        server = BrokerServer(transport, scheduler, config, roles, boot=boot, journal=recorder)
        server.start()
        if curve_keys is not None:
            reload = KeyReload(curve_keys, transport, server)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        keys = len(roles) if roles is not None else None
        log.info("broker_listening", address=transport.address, keys=keys)
        click.echo(transport.address)
        await stop.wait()
        server.close()
        log.info("broker_stopped")

    run_until_stopped(serve)


class KeyReload:
    """SIGHUP: the folder's keys count from now on, or, if one is wrong, those from before."""

    def __init__(self, folder: Path, transport: ZmqServer, server: BrokerServer) -> None:
        self._folder = folder
        self._transport = transport
        self._server = server

    def __call__(self) -> None:
        log = bus.log.logger()
        try:
            keyring = read_keyring(self._folder)
        except UsageError as error:
            bus.log.write(log, Note("keys_not_reloaded", "error", {"detail": str(error)}))
            return
        self._transport.keyring = keyring
        self._server.rekey(keyring.roles())
        log.info("keys_reloaded", keys=len(keyring.authorized))
