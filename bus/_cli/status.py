"""The command `wavebus status`: shows the broker's view of groups and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec
from msgspec import structs

from bus._cli.options import broker_option, echo, json_option, key_options, timeout_option
from bus._runtime.event_loop import run
from bus._runtime.status_client import fetch_status
from bus.errors import UsageError

if TYPE_CHECKING:
    from bus._cli.options import BrokerAddress, Keys
    from bus.messages import EngineView, GroupStatus, Status

NO_GROUP: Final = "no group yet: no sidecar and no trainer has joined"
_NAMED: Final = 4  # engine names in one line
_LONG_MS: Final = 10_000.0  # after this an engine core's step is shown as long


@click.command()
@broker_option
@click.option("--group", default=None, help="Show this group alone.")
@timeout_option
@key_options
@json_option
def status(
    address: BrokerAddress, group: str | None, timeout_s: float, keys: Keys, as_json: bool
) -> None:
    """Show groups, engines, versions, and which peers delay a step.

    Exits with 3 if no broker answers.
    """
    answer = run(fetch_status(address.broker, timeout_s=timeout_s, security=keys.security()))
    answer = structs.replace(answer, groups=groups_of(answer, group))
    if as_json:
        echo(msgspec.json.encode(answer).decode())
    else:
        echo(*_table(address.broker, answer))


def groups_of(answer: Status, group: str | None) -> tuple[GroupStatus, ...]:
    """Returns the groups that ``--group`` names: one, or all if it is None.

    Raises:
        UsageError: the broker has no such group.
    """
    chosen = tuple(each for each in answer.groups if group in (None, each.name))
    if group is not None and not chosen:
        names = ", ".join(each.name for each in answer.groups) or "none"
        raise UsageError(f"--group={group}: the broker has no such group; it has: {names}")
    return chosen


def _table(address: str, answer: Status) -> list[str]:
    used = f"{answer.cpu_s:.1f} s of CPU, {answer.rss_bytes / 1e6:.0f} MB"
    lines = [f"broker {address}: up {answer.uptime_s:.0f} s, {answer.peers} peers, {used}"]
    if not answer.groups:
        lines.append(NO_GROUP)
    for group in answer.groups:
        lines.append("")
        lines.append(
            f"group {group.name}: version {group.version}, {group.pause}, update {group.update}"
            + (" of the draft" if group.update_target == "draft" else "")
            + (f" ({group.update_id})" if group.update_id else "")
            + f", epoch {group.epoch}, trainer {group.owner or 'none'}"
        )
        if group.waiting_for:
            lines.append(f"  waiting for: {', '.join(group.waiting_for)}")
        if not group.engines:
            lines.append("  no engine has joined")
        lines += _columns(
            ("engine", "dp group", "version", "phase", "serves", "requests", "heard", "endpoint"),
            [
                (
                    engine.name,
                    f"{_rank(group, engine)} {engine.pd_role}".rstrip(),
                    str(engine.version),
                    engine.phase,
                    _serves(group, engine),
                    str(engine.in_flight),
                    f"{engine.last_heard_ms / 1000:.1f} s",
                    engine.endpoint or "-",
                )
                for engine in group.engines
            ],
        )
        absent = [out for out in group.out if out.state != "quarantined"]
        lines += [f"  {out.engine} is {out.state}: {out.reason}" for out in absent]
        lines += _missing_features(group)
        lines += _dp_groups(group)
    return [line.rstrip() for line in lines]


def _rank(group: GroupStatus, engine: EngineView) -> str:
    """Returns an engine's DP group and rank; ``-`` for an engine without peer ranks."""
    in_one = any(each.name == engine.dp_group for each in group.dp_groups)
    return f"{engine.dp_group}/{engine.dp_rank}" if in_one else "-"


def _serves(group: GroupStatus, engine: EngineView) -> str:
    """Returns whether the engine is routable, as text; if not, the reason."""
    if engine.name in group.routable:
        return "yes"
    dp_group = next((each for each in group.dp_groups if each.name == engine.dp_group), None)
    if engine.phase in ("quarantined", "weights_discarded"):
        waits_for = "a whole update"
    elif engine.phase == "asleep":
        waits_for = "a wake"
    elif dp_group is not None and dp_group.ranks < dp_group.size:
        waits_for = f"{dp_group.size - dp_group.ranks} ranks of its DP group"
    elif engine.version != group.version:
        waits_for = f"an update to version {group.version}"
    elif engine.core_phase == "step" and engine.core_since_ms > _LONG_MS:
        waits_for = f"its core, in one step for {engine.core_since_ms / 1000:.0f} s"
    else:
        waits_for = "a resume, which opens admission"
    return f"no, waits for {waits_for}"


def _missing_features(group: GroupStatus) -> list[str]:
    """Returns warnings about each engine's vLLM.

    They name features that are off, how updates treat KV connectors, requests whose KV cache names
    no version, and a version of vLLM that wavebus was not tested with.
    """
    who: dict[str, list[str]] = {}
    for engine in group.engines:
        off = [f"{name} is off: {why}" for name, why in engine.features.items() if why]
        kv = [f"KV connector {name}: {how}" for name, how in engine.kv_connectors.items()]
        if engine.untagged:
            kv.append(f"{engine.untagged} requests with KV that names no version (docs/pd.md)")
        for text in (*off, *kv, *filter(None, [engine.untested])):
            who.setdefault(text, []).append(engine.name)
    return [f"  {text} ({_some(names)})" for text, names in who.items()]


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _dp_groups(group: GroupStatus) -> list[str]:
    if not group.dp_groups:
        return []
    lines = ["", "  waves:"]
    lines += _columns(
        ("dp group", "state", "wave", "ranks", "health", "coordinator"),
        [
            (
                each.name,
                each.state + (", a request waits" if each.first_req else ""),
                str(each.wave)
                + (f", begun by rank {each.started_by}" if each.started_by is not None else ""),
                f"{each.ranks} of {each.size}",
                each.health,
                each.coordinator or "-",
            )
            for each in group.dp_groups
        ],
    )
    cores = [engine for engine in group.engines if engine.core_phase]
    if cores:
        lines.append("  cores:")
        lines += _columns(
            ("rank", "does", "since", "step", "wave"),
            [
                (
                    f"{engine.dp_group}/{engine.dp_rank}",
                    engine.core_phase,
                    f"{engine.core_since_ms / 1000:.1f} s",
                    str(engine.core_step),
                    str(engine.core_wave),
                )
                for engine in cores
            ],
        )
    lines += [f"  {each.name}: {each.diagnosis}" for each in group.dp_groups if each.diagnosis]
    return lines


def _columns(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
