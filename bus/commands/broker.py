"""`wavebus broker`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

import bus.log
from bus.commands.options import configure_log, log_options, run_until_stopped
from bus.errors import UsageError
from bus.ids import new_boot
from bus.journal.writer import DEFAULT_BYTES, LEAST_BYTES, MOST_BYTES, JournalWriter
from bus.protocol.broker import BrokerConfig
from bus.runtime.aio import AsyncioScheduler
from bus.runtime.broker import BrokerServer
from bus.runtime.zmq_transport import ZmqServer
from bus.settings import DEFAULT_BROKER

if TYPE_CHECKING:
    import asyncio


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
    "--insecure",
    is_flag=True,
    help="Listen beyond loopback, where anyone who reaches the port may command engines.",
)
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
    if not insecure and not is_loopback(listen):
        raise UsageError(
            f"--listen={listen}: not a loopback address; say --insecure if everyone who can "
            "reach that port may pause your engines and replace their weights"
        )
    config = BrokerConfig(
        heartbeat_ms=heartbeat_ms,
        peer_timeout_ms=peer_timeout_ms,
        step_timeout_ms=step_timeout_ms,
    )

    async def serve(stop: asyncio.Event) -> None:
        log = bus.log.logger()
        scheduler = AsyncioScheduler()
        transport = ZmqServer(listen)
        boot = new_boot()
        recorder = None
        if journal is not None:
            recorder = JournalWriter(
                journal,
                limit_bytes=journal_bytes,
                boot=boot,
                config=config,
                scheduler=scheduler,
                failed=lambda error: log.error("journal_failed", reason=str(error)),
            )
        server = BrokerServer(transport, scheduler, config, boot=boot, journal=recorder)
        server.start()
        log.info("broker_listening", address=transport.address)
        click.echo(transport.address)
        await stop.wait()
        server.close()
        log.info("broker_stopped")

    run_until_stopped(serve)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a ZeroMQ address."""
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = parts.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
