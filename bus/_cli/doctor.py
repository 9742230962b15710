"""The command `wavebus doctor`: checks this host's installation, with hints for what is missing.

Installed roles add checks with the entry point group ``wavebus.doctor``: functions
``(Options) -> list[Check]``.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import click

from bus._cli import features
from bus._cli.options import NamedPath, broker_option, checked, echo, json_option, key_options
from bus._net import check_url, is_loopback
from bus._runtime.event_loop import has_uvloop, run
from bus._runtime.status_client import fetch_status
from bus._runtime.zmq_transport import ZmqServer, library_version
from bus.errors import BusTimeout, UsageError, WavebusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bus._cli.options import BrokerAddress, Keys
    from bus._keys import Security
    from bus._vllm.seams import Registry, Report

State: TypeAlias = Literal["ok", "note", "warn", "fail"]
ENOUGH_FILES: Final = 4096
_ANSWER_S: Final = 1.0
_MARKS: Final[dict[str, str]] = {"ok": "✓", "note": "·", "warn": "!", "fail": "✗"}
_COLOURS: Final[dict[str, str]] = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check that `wavebus doctor` made on this host.

    Attributes:
        name: what was checked, such as ``event loop``.
        state: ``ok``; ``note``: works, but could be better; ``warn``: may fail; ``fail``: broken.
        detail: what was found.
        hint: what to do if ``state`` is not ``ok``.
    """

    name: str
    state: State
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `wavebus doctor`, for the checks of every role.

    Attributes:
        broker: the address at which a broker is looked for.
        attach: the base URL of a vLLM server to check; None: none.
        security: the keys for the connection to the broker; None: no keys.
    """

    broker: str
    attach: str | None
    security: Security | None = None


@click.command()
@broker_option
@click.option(
    "--attach",
    metavar="URL",
    callback=checked(check_url),
    default=None,
    help="Also check the vLLM server at this URL: its RL routes and its backend.",
)
@click.option(
    "--vllm",
    "wheels",
    metavar="PATH",
    multiple=True,
    type=NamedPath(exists=True),
    help="Only check which features wavebus supports with the vLLM at this path: a wheel, an "
    "unpacked wheel, or a site-packages folder. vLLM is not imported. May be given several times.",
)
@click.option("--markdown", is_flag=True, help="With --vllm: print the table as Markdown.")
@key_options
@json_option
def doctor(
    address: BrokerAddress,
    attach: str | None,
    wheels: tuple[Path, ...],
    markdown: bool,
    keys: Keys,
    as_json: bool,
) -> None:
    """Check this machine: versions, vLLM and its RL routes, plugin, ports, shared memory, clock.

    Exits with 1 if something is broken or, with --vllm, if a feature is off; otherwise with 0.
    """
    if wheels:
        _show_features(wheels, markdown=markdown, as_json=as_json)
    if markdown:
        raise UsageError("--markdown goes with --vllm PATH")
    options = Options(address.broker, attach, keys.security())
    checks: list[Check] = []
    for check in _all_checks(options):  # some take long, so each is shown when it is made
        checks.append(check)
        if as_json:
            continue
        click.secho(_MARKS[check.state], fg=_COLOURS[check.state], bold=True, nl=False)
        echo(f" {check.name:<22} {check.detail}")
        if check.hint and check.state != "ok":
            echo(f"  {'':<22} → {check.hint}")
    failed = any(check.state == "fail" for check in checks)
    if as_json:
        echo(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}))
    raise click.exceptions.Exit(1 if failed else 0)


def _all_checks(options: Options) -> Iterator[Check]:
    yield _python()
    yield _packages()
    yield _loop()
    yield _clock()
    yield _files()
    yield _broker(options.broker, options.security)
    for entry in sorted(entry_points(group="wavebus.doctor"), key=lambda e: e.name):
        try:
            yield from entry.load()(options)
        except ModuleNotFoundError as error:
            detail = f"role not usable here: {error.name} is not installed"
            extra = "sidecar" if entry.name == "sidecar" else "trainer"
            yield Check(entry.name, "note", detail, f"pip install 'wavebus[{extra}]'")


def _show_features(wheels: tuple[Path, ...], *, markdown: bool, as_json: bool) -> None:
    found = features.reports(wheels)
    if as_json:
        echo(json.dumps(features.as_json(wheels, found)))
    else:
        echo(*(features.markdown(found) if markdown else features.table(found)).split("\n"))
    raise click.exceptions.Exit(0 if all(map(features.has_all_features, found)) else 1)


def feature_checks(name: str, registry: Registry, report: Report) -> list[Check]:
    """Returns one check for all features, and one for each feature that is off.

    Args:
        name: the name of the check for all features.
        registry: the role's features, each with the places in vLLM on which it depends.
        report: which of these features the installed vLLM supports.
    """
    off = report.off
    works = len(registry.features) - len(off)
    return [
        Check(name, "ok", f"{works} of {len(registry.features)} work here"),
        *(
            Check(each, "warn", f"off: {why[:200]}", f"wavebus can't {registry.features[each]}")
            for each, why in off.items()
        ),
    ]


def _python() -> Check:
    found = platform.python_version()
    return Check("python", "ok", f"{found} on {platform.system()} {platform.machine()}")


def _packages() -> Check:
    found = [f"wavebus {version('wavebus')}"]
    for package in ("pyzmq", "msgspec", "msgpack", "anyio", "structlog"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Check("packages", "fail", f"{package} is missing", f"pip install {package}")
    return Check("packages", "ok", f"{', '.join(found)}, libzmq {library_version()}")


def _loop() -> Check:
    if has_uvloop():
        return Check("event loop", "ok", "uvloop")
    hint = "pip install 'wavebus[fast]' for a faster event loop"
    return Check("event loop", "note", "asyncio", hint)


def _clock() -> Check:
    resolution_ms = time.get_clock_info("monotonic").resolution * 1000
    if resolution_ms > 1:
        detail = f"the monotonic clock has steps of {resolution_ms:.1f} ms"
        return Check("clock", "warn", detail, "durations in logs are no more precise than that")
    built = os.stat(__file__).st_mtime  # noqa: PTH116
    if time.time() + 86_400 < built:
        said = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        detail = f"the wall clock says {said} UTC, which is before this file was installed"
        hint = "set it (NTP), or the logs of several hosts can't be compared"
        return Check("clock", "warn", detail, hint)
    return Check("clock", "ok", f"monotonic, steps of {resolution_ms * 1e6:.0f} ns")


def _files() -> Check:
    """Checks the limit of open files, since a broker needs one descriptor per peer."""
    import resource  # noqa: PLC0415 - not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < ENOUGH_FILES:
        detail = f"limit {soft} (hard {hard}): enough for about {soft // 3} peers"
        hint = "ulimit -n 65536, before a broker of many engines"
        return Check("file descriptors", "warn", detail, hint)
    return Check("file descriptors", "ok", f"limit {soft}")


def _broker(address: str, how: Security | None) -> Check:
    """Checks that a broker answers at the address or, if none does, could listen there."""
    try:
        status = run(fetch_status(address, timeout_s=_ANSWER_S, security=how))
    except UsageError as error:
        return Check("broker", "fail", str(error), "give --broker an address, or keys")
    except BusTimeout as error:
        if not is_loopback(address):
            return Check("broker", "warn", str(error), "start it there, or look at its log")
    except WavebusError as error:
        return Check("broker", "warn", str(error), "use the same wavebus on both sides")
    else:
        groups = ", ".join(f"{g.name} ({len(g.engines)} engines)" for g in status.groups) or "none"
        return Check("broker", "ok", f"{address} answers; groups: {groups}")
    try:
        run(_bind(address))
    except UsageError as error:
        detail = f"nobody answers, and {error}"
        return Check("broker", "warn", detail, "another program has the port")
    return Check("broker", "note", f"none at {address}; the port is free", "wavebus broker")


async def _bind(address: str) -> None:
    ZmqServer(address).close()
