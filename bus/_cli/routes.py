"""The command `wavebus routes`: shows the routable engines, and updates a router with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click
import msgspec

from bus._cli.options import (
    BrokerAddress,
    GroupPlan,
    Keys,
    checked,
    configure_log,
    echo,
    json_option,
    key_options,
    option,
    options_of,
    run_until_stopped,
    timeout_option,
)
from bus._cli.router_workers import RouterWorkers
from bus._cli.status import NO_GROUP, groups_of
from bus._keys import silence_hint
from bus._net import check_url
from bus._protocol.core.followed_routes import FollowedRoutes
from bus._protocol.core.link import LinkState
from bus._runtime.event_loop import run
from bus._runtime.peer import PeerClient, default_name
from bus._runtime.status_client import fetch_status
from bus.errors import BusTimeout, refusal
from bus.messages import Envelope, Message, Routes, RoutesTaken, Status, StatusRequest

if TYPE_CHECKING:
    from bus._keys import Security

_STDOUT: Final = 1
_GROUP: Final = GroupPlan.group


@dataclass(frozen=True)
class RoutesPlan(BrokerAddress):
    """Options of ``wavebus routes``."""

    group: str | None = option(
        None,
        f"Show this group alone.  [env: WAVEBUS_GROUP]  [default: all; with --router: {_GROUP}]",
        envvar="WAVEBUS_GROUP",
    )
    follow: bool = option(False, "Keep running, and print each change.", "--follow", "-f")
    router: str | None = option(
        None,
        "Keep the worker list of this vllm-router equal to the routes of --group, and follow.",
        metavar="URL",
        callback=checked(check_url),
    )


@click.command()
@options_of(RoutesPlan)
@timeout_option
@key_options
@json_option
def routes(plan: RoutesPlan, timeout_s: float, keys: Keys, as_json: bool) -> None:
    """Show the engines that take requests, with their group's version.

    With --router, keeps the router's list of workers equal to these engines. Workers that never
    belonged to the group stay in the list. When the command ends, the list stays as it is.

    With --json, one object for each group (and, with --follow, for each change). Exits with 3 if no
    broker answers.
    """
    security = keys.security()
    if not (plan.follow or plan.router):
        answer = run(fetch_status(plan.broker, timeout_s=timeout_s, security=security))
        if not answer.groups:
            echo(NO_GROUP, err=True)
        for each in groups_of(answer, plan.group):
            _print(each.name, each.routes, as_json=as_json)
        return
    configure_log("info" if plan.router else "warning", "auto")
    workers = RouterWorkers(plan.router, plan.group or _GROUP) if plan.router else None
    run_until_stopped(
        lambda stop: _follow(plan, security, timeout_s, stop, workers, as_json=as_json)
    )


async def _follow(
    plan: RoutesPlan,
    security: Security,
    timeout_s: float,
    stop: asyncio.Event,
    workers: RouterWorkers | None,
    *,
    as_json: bool,
) -> None:
    name = default_name("observer")
    ended = asyncio.Event()
    joined = asyncio.Event()

    followed = FollowedRoutes(lambda request: peer.send(request))  # noqa: PLW0108 - made below

    def on_message(envelope: Envelope, message: Message) -> None:
        routes = followed.receive(envelope, message)
        if routes is not None:
            if plan.group not in (None, envelope.group):
                return
            with contextlib.suppress(BrokenPipeError):  # _watch_output ends the command
                _print(envelope.group, routes, as_json=as_json)
            if workers is not None:
                workers.on_routes(envelope.group, routes)
        elif isinstance(message, Status) and workers is not None:
            workers.on_status(message)

    def on_state(state: LinkState) -> None:
        if state is LinkState.JOINED:
            if joined.is_set() and workers is not None:
                workers.on_rejoined()
            joined.set()
        if state is LinkState.REFUSED:
            joined.set()
            ended.set()

    peer = PeerClient(
        name=name,
        group="",
        broker=plan.broker,
        security=security,
        on_message=on_message,
        on_state=on_state,
    )
    peer.start()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_watch_output, args=(loop, ended), daemon=True).start()
    try:
        try:
            await asyncio.wait_for(joined.wait(), timeout_s)
        except TimeoutError:
            raise BusTimeout(
                f"no broker answers at {plan.broker} within {timeout_s:g} s{silence_hint(security)}"
            ) from None
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(each.wait()) for each in (stop, ended)
        ]
        if workers is not None:
            follow = workers.follow(
                lambda: peer.send(StatusRequest()),
                lambda revision: peer.send(RoutesTaken(plan.group or _GROUP, revision)),
            )
            waits.append(asyncio.create_task(follow))
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        await asyncio.gather(*done)
        if peer.link.refusal is not None:
            raise refusal(peer.link.refusal)
    finally:
        peer.close()


def _watch_output(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """Sets ``ended`` when the reader of stdout is gone, even if nothing is written."""
    output = select.poll()
    output.register(_STDOUT, 0)  # errors and hang-ups are always reported
    output.poll()
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # buffered output goes there
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(ended.set)


def _print(group: str, routes: Routes, *, as_json: bool) -> None:
    if as_json:
        shown = {"group": group, "version": routes.version, "engines": routes.engines}
        echo(msgspec.json.encode(shown).decode())
        return
    parts = [(e.engine, e.endpoint, f"({e.pd_role})" * bool(e.pd_role)) for e in routes.engines]
    names = ", ".join(" ".join(filter(None, each)) for each in parts) or "nobody"
    echo(f"{group} version {routes.version}: {names}")
