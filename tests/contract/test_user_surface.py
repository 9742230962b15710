"""Snapshots of what users hold on to: commands, JSON, wire, log events, settings, Python names.

Each test renders one part of the surface as text and compares it with a file of
``tests/contract/surface``. The files have no module path of the product, so they stay the same when
code moves. ``WAVEBUS_RECORD_SURFACE=1`` records all of them anew.

All names of the product that the tests use are in the imports below, so a module that moves needs
no other edit. The benches' private functions, which ``_quick_…`` replaces, are named there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import re
import signal
import socket
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import click
import pytest
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file

# The implementation, wherever it lives: the one place to edit when modules move.
from bus import errors, operations
from bus._cli.main import main, wavebus
from bus._journal import records
from bus._journal.reader import Entry, read
from bus._journal.writer import journal_files
from bus._manifest import Manifest, TensorMeta
from bus._protocol.core.config import BrokerConfig
from bus._protocol.dp.watchdog import Health
from bus._settings import DEFAULT_BROKER, DEFAULT_FILE
from bus._weight_transfer.allocation import RankAssignment, World
from bus._weight_transfer.base import Receiver, Sender
from bus._weight_transfer.formats import decode, encode
from bus._weight_transfer.registry import register_receiver, register_sender
from bus.errors import DecodeError, EngineDead, EngineError, Refused, WavebusError, refusal
from bus.messages import (
    MAX_FRAME_BYTES,
    WIRE_NAMES,
    WIRE_VERSION,
    CanaryMode,
    Envelope,
    Escalation,
    Nack,
    NackCode,
    PauseMode,
    SleepLevel,
    Status,
    Step,
    Target,
    Verify,
)
from lab.bench import cli as bench_cli
from lab.bench import control, fleet, harness, pause, transfer, updates
from lab.bench import gateway as gateway_bench
from lab.bench import rollout as rollout_bench
from lab.bench.plans import ControlPlan, EnginesPlan
from lab.bench.updates import Measured, UpdateRound
from lab.demo import chaos as demo_chaos
from lab.demo import report as demo_report
from lab.demo import run as demo_run
from lab.demo import twin as demo_twin
from lab.demo.plan import DemoPlan
from sidecar import Sidecar
from sidecar._dp_coordinator.__main__ import coordinator
from sidecar._vllm.inprocess_engine import VllmEngine
from sidecar.embedded import EmbeddedEngine, SamplingParams
from sidecar.engine import Engine, EngineInfo
from tests.support.checkpoints import make_checkpoint
from tests.support.log_calls import LogCalls
from tests.support.procs import PATIENT
from tests.support.procs import wavebus as start_wavebus
from tests.support.surface import (
    ROOT,
    annotation_text,
    check_snapshot,
    class_text,
    declared_shape,
    field_lines,
    json_shape,
    plain,
    product_files,
    product_packages,
    product_trees,
    pyproject,
    shape_text,
    signature_text,
    type_text,
)
from trainer_agent import (
    Canary,
    CpuCache,
    RolloutBuffer,
    RolloutClient,
    SyncRolloutClient,
    SyncTrainerAgent,
    TrainerAgent,
    UpdateReport,
    WeightSource,
    share_memory,
)
from trainer_agent._options import How, PauseArguments, Quorum, UpdateArguments

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

# What users import, subclass or are handed.
CLASSES: list[type] = [
    *(TrainerAgent, SyncTrainerAgent, Canary, CpuCache, UpdateReport, WeightSource),
    *(RolloutClient, SyncRolloutClient, RolloutBuffer),
    *(PauseArguments, UpdateArguments),
    *(Sidecar, Engine, EngineInfo, EmbeddedEngine, SamplingParams, VllmEngine),
    *(*get_args(operations.UpdateOperation), operations.Done),
    *(Sender, Receiver, RankAssignment, World, Manifest, TensorMeta),
]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "share_memory": share_memory,
    "register_receiver": register_receiver,
    "register_sender": register_sender,
    "encode": encode,
    "decode": decode,
    "refusal": refusal,
}
# What arguments may be, by the name in the signatures.
CHOICES = {
    "How": How,
    "Quorum": Quorum,
    "PauseMode": PauseMode,
    "Escalation": Escalation,
    "SleepLevel": SleepLevel,
    "Target": Target,
    "Verify": Verify,
    "CanaryWay": CanaryMode,
}
# Programs of their own, by what they are called in the snapshots.
PROGRAMS = {"DP coordinator": coordinator}
# Commands that refuse to run without arguments in their body, after parsing.
REFUSES_IN_ITS_BODY = ("sidecar",)
PARSED = 99


class Done(NamedTuple):
    """A command that ended."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """80 columns, no settings of the caller's, and a current folder without wavebus.toml."""
    for name in [name for name in os.environ if name.startswith("WAVEBUS_")]:
        if name != "WAVEBUS_RECORD_SURFACE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ask(*arguments: object) -> Done:
    """Runs the command in this process, as its script does."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["wavebus", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
    else:
        code = 0
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def ask_json(*arguments: object, code: int = 0) -> Any:
    """The JSON object that a command prints."""
    done = ask(*arguments)
    assert done.code == code, done
    return json.loads(done.out)


# -- commands ----------------------------------------------------------------------------------


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that lead to it, the root first."""
    yield from _below((), wavebus, click.Context(wavebus, info_name="wavebus"))


def _below(
    words: tuple[str, ...], command: click.Command, ctx: click.Context
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(ctx)):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _below((*words, name), inner, click.Context(inner, ctx, name))


def test_help() -> None:
    """The help text of every command."""
    texts: list[str] = []
    for words, _ in commands():
        done = ask(*words, "--help")
        assert done.code == 0, done.err
        assert done == ask(*words, "-h")
        texts += [f"$ {' '.join(('wavebus', *words))} --help", "", done.out]
    for name, program in PROGRAMS.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert isinstance(program, click.Command)
            program.main(["--help"], prog_name="PROGRAM", standalone_mode=False)
        texts += [f"$ {name} --help", "", out.getvalue()]
    check_snapshot("help.txt", "\n".join(texts))


@pytest.mark.ci
def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of every command for --help, for no arguments and for an option that it has not;
    and the code of each error."""
    with monkeypatch.context() as patch:
        patch.setattr(click.Command, "invoke", _only_parse)
        lines = ["command: --help, no arguments, an unknown option"]
        for words, _ in commands():
            told = [ask(*words, *more).code for more in (("--help",), (), ("--no-such-option",))]
            shown = ["parsed" if code == PARSED else str(code) for code in told]
            lines.append(f"  {' '.join(('wavebus', *words))}: {', '.join(shown)}")
    lines += ["", "what ends a command: exit code"]
    with monkeypatch.context() as patch:
        for name, error in sorted(_errors()):
            patch.setattr(click.Command, "invoke", _raising(error))
            lines.append(f"  {name}: {ask('status').code}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        code = ask("status", "--broker", nobody, "--timeout-s", "0.1").code
    lines.append(f"  no broker answers: {code}")
    lines.append(f"  no such command: {ask('no-such-command').code}")
    lines.append(f"  --version: {ask('--version').code}")
    check_snapshot("exit_codes.txt", "\n".join(lines))


_invoke = click.Command.invoke


def _only_parse(self: click.Command, ctx: click.Context) -> Any:
    """Stands for a command's body, so that a broker or a demo does not start."""
    if isinstance(self, click.Group) or self.name in REFUSES_IN_ITS_BODY:
        return _invoke(self, ctx)
    return PARSED


def _raising(error: BaseException) -> Callable[[click.Command, click.Context], Any]:
    def invoke(self: click.Command, ctx: click.Context) -> Any:
        if isinstance(self, click.Group):
            return _invoke(self, ctx)
        raise error

    return invoke


def _nack(code: NackCode = NackCode.TIMEOUT, step: str = "") -> Nack:
    return Nack(code, step, "u1", 0, "detail", "", "peer", "", "", 0)


def _errors() -> Iterator[tuple[str, BaseException]]:
    """One of each error class, and the interruption of a user."""
    yield "Ctrl-C", KeyboardInterrupt()
    yield "Refused by a dead engine", Refused(_nack(NackCode.ENGINE_DEAD))
    for cls in _error_classes():
        if issubclass(cls, Refused):
            yield cls.__name__, cls(_nack())
        elif issubclass(cls, DecodeError):
            yield cls.__name__, cls(NackCode.MALFORMED, "field", "detail")
        else:
            yield cls.__name__, cls("detail")


def _error_classes() -> list[type[WavebusError]]:
    found = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, WavebusError)
    }
    return sorted(found, key=lambda cls: cls.__name__)


def test_settings() -> None:
    """Options with environment variables and defaults, the file of settings, and limits of the
    broker that a journal shows."""
    lines = [f"default broker: {DEFAULT_BROKER}", f"default file: {DEFAULT_FILE}"]
    for words, command in commands():
        lines += ["", " ".join(("wavebus", *words))]
        for param in command.params:
            name = " ".join(param.opts + param.secondary_opts)
            told = [f"  {name} [{param.param_type_name}]: {_kind(param.type)}"]
            if isinstance(param, click.Option):
                told.append(f"key {max(param.opts, key=len).lstrip('-')}")
            if param.envvar:
                told.append(f"env {param.envvar}")
            if param.required:
                told.append("required")
            if param.multiple or param.nargs != 1:
                told.append("several")
            if not param.required and (default := _default(param)) is not None:
                told.append(f"default {default}")
            lines.append(", ".join(told))
    lines += ["", "broker's limits", *field_lines(BrokerConfig)]
    check_snapshot("settings.txt", "\n".join(lines))


def _kind(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return " | ".join(kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        least, most = ("" if each is None else each for each in (kind.min, kind.max))
        return f"{kind.name} {least}..{most}"
    return str(kind.name)


def _default(param: click.Parameter) -> str | None:
    found = param.to_info_dict().get("default")
    if found is None or found == ():
        return None
    return json.dumps(found, default=str)


@pytest.mark.ci
def test_environment_variables() -> None:
    """Every variable of wavebus that the product's code names."""
    named: set[str] = set()
    for tree in product_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"WAVEBUS_[A-Z0-9_]*[A-Z0-9]", node.value))
    check_snapshot("environment.txt", "\n".join(sorted(named)))


def test_entry_points() -> None:
    """Scripts, entry points and extras of pyproject.toml; not the modules that they lead to."""
    project = pyproject()["project"]
    lines = [f"script: {name}" for name in sorted(project["scripts"])]
    for group, entries in sorted(project["entry-points"].items()):
        lines += [f"entry point {group}: {name}" for name in sorted(entries)]
    lines += [f"extra: {name}" for name in sorted(project["optional-dependencies"])]
    check_snapshot("entry_points.txt", "\n".join(lines))


# -- JSON that commands print --------------------------------------------------------------------


def test_json_of_a_live_bus(tmp_path: Path) -> None:
    """A real broker, an embedded engine and a trainer: status, routes, why, journal, replay and
    trace print these keys."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", seed=1)
    weights = load_file(checkpoint.folder / "model.safetensors")
    folder = tmp_path / "journal"
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(
            start_wavebus(
                *("broker", "--listen", "tcp://127.0.0.1:*", "--journal", str(folder)), *PATIENT
            )
        )
        address = broker.first_line()
        at = ("--broker", address, "--timeout-s", "60")
        portal = stack.enter_context(start_blocking_portal("asyncio"))
        engine = EmbeddedEngine(checkpoint.folder)
        sidecar = portal.call(lambda: _made(Sidecar, engine, broker=address, name="e0"))
        stack.enter_context(portal.wrap_async_context_manager(sidecar))
        with SyncTrainerAgent(address, name="trainer") as agent:
            agent.wait_for_engines(1)
            agent.update_weights(weights, how="paused")
            agent.update_weights(weights, how="staged")
            with agent.paused():
                held = ask_json("why", "--json", *at)
                status = ask_json("status", "--json", *at)
            routes = ask_json("routes", "--json", *at)
        assert broker.stop() == 0

    shown = [json.loads(line) for line in _out("journal", "show", folder, "--json", "--full")]
    replayed = ask_json("replay", "--json", folder)
    assert _out("trace", folder, "-o", tmp_path / "trace.json")
    traced = json.loads((tmp_path / "trace.json").read_text())
    differs = ask_json("replay", "--json", _without_an_ack(folder, tmp_path / "other"), code=1)
    shown += [json.loads(line) for line in _out("journal", "show", _odd(tmp_path), "--json")]

    found = json_shape(status)
    declared = declared_shape(Status)
    assert {path: kinds - declared.get(path, set()) for path, kinds in found.items()} == {
        path: set() for path in found
    }
    assert "$.groups[].engines[].name" in found
    fields = {name: {each.split(":")[0].strip() for each in _own(cls)} for cls, name in _wire()}
    for each in shown:
        if "message" in each:
            assert set(each["message"]) <= fields[each["kind"]], each["kind"]
            each["message"] = "the fields of the message, as wire.txt has them"
    texts = [
        shape_text("wavebus status --json", declared),
        shape_text("wavebus routes --json, one object for each group", json_shape(routes)),
        shape_text("wavebus why --json", json_shape(held)),
        *(
            shape_text(
                f'wavebus journal show --json, "what": "{what}"',
                json_shape(*(each for each in shown if each["what"] == what)),
            )
            for what in sorted({each["what"] for each in shown})
        ),
        shape_text("wavebus replay --json", json_shape(replayed, differs)),
        *(
            shape_text(
                f'wavebus trace, "ph": "{kind}"',
                json_shape(*(each for each in traced["traceEvents"] if each["ph"] == kind)),
            )
            for kind in sorted({each["ph"] for each in traced["traceEvents"]})
        ),
        shape_text("wavebus trace", json_shape({**traced, "traceEvents": []})),
    ]
    check_snapshot("json_live.txt", "\n".join(texts))


async def _made(cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes something where the event loop runs."""
    return cls(*args, **kwargs)


def _out(*arguments: object) -> list[str]:
    done = ask(*arguments)
    assert done.code == 0, done
    return done.out.splitlines()


def _without_an_ack(folder: Path, changed: Path) -> Path:
    """A journal that lacks the first ACK, so that its replay differs."""
    (path,) = journal_files(folder)
    acks = _out("journal", "show", folder, "--json", "--message", "ACK")
    number = json.loads(acks[0])["record"]
    entries = [each for each in read(path) if isinstance(each, Entry)]
    return _written(changed, [each.record for each in entries if each.number != number])


def _odd(folder: Path) -> Path:
    """A journal of the records that no quiet bus leaves, and of a damaged frame."""
    began = records.FileBegan(1, 0, 0, 0.0, 0.0, "wavebus", BrokerConfig(), {"key": "engine"})
    return _written(
        folder / "odd",
        [
            began,
            records.FrameRefused(1.0, b"e0", 5),
            records.KeysChanged(2.0, {"key": "engine"}),
            records.TimerFired(3.0),
            records.FrameReceived(4.0, b"e0", b"damaged", "key"),
            records.FrameSent(5.0, (b"e0",), b"damaged"),
            records.BrokerClosed(6.0),
        ],
    )


def _written(folder: Path, kept: list[records.Record]) -> Path:
    folder.mkdir()
    path = folder / f"0{records.SUFFIX}"
    path.write_bytes(records.MAGIC + b"".join(map(records.pack, kept)))
    return path


@pytest.mark.ci
def test_json_of_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `doctor --json` prints with and without --vllm, and the names of checks and features.

    The checks of the roles take long, so here those of the bus alone run. All return the same
    class.
    """
    unpacked = tmp_path / "wheel" / "vllm"
    unpacked.mkdir(parents=True)
    (unpacked / "__init__.py").write_text("")
    (unpacked / "_version.py").write_text('__version__ = version = "0.1.0"\n')
    features = ask_json("doctor", "--json", "--vllm", unpacked.parent, code=1)

    load = EntryPoint.load

    def quick(self: EntryPoint) -> Any:
        return (lambda _: []) if self.group == "wavebus.doctor" else load(self)

    monkeypatch.setattr(EntryPoint, "load", quick)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        checks = ask_json("doctor", "--json", "--broker", address)
    names = sorted(name for tree in product_trees() for name in _check_names(tree))
    texts = [
        shape_text("wavebus doctor --json", json_shape(checks)),
        shape_text("wavebus doctor --vllm PATH --json", json_shape(features)),
        "names of features",
        *(f"  {name}" for name in sorted(features[0]["features"])),
        "",
        "names of checks",
        *(f"  {name}" for name in dict.fromkeys(names)),
    ]
    assert {each["name"] for each in checks["checks"]} <= set(names)
    check_snapshot("json_doctor.txt", "\n".join(texts))


def _check_names(tree: ast.Module) -> Iterator[str]:
    """The names of the doctor's checks in a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="Check" | "feature_checks"),
                args=[ast.Constant(value=str() as name), *_],
            ):
                yield name


def test_json_of_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`demo --json`, with `--chaos` and with `--sessions`, prints its result's object. No demo runs
    here."""
    result = demo_run.DemoResult(DemoPlan())
    monkeypatch.setattr(demo_run, "run_demo", lambda *_, **__: result)
    monkeypatch.setattr(demo_report, "picture", lambda *_: None)
    demo = ask_json("demo", "--json")
    assert demo == json.loads(json.dumps(result.as_json()))

    chaos = demo_chaos.ChaosResult(DemoPlan(journal=tmp_path), healed=True, updates=2)
    chaos.counts.tokens_by_version.update([1, 2])
    for counter in (chaos.kills, chaos.errors, chaos.counts.why_lost, chaos.counts.cut_short):
        counter["some"] = 1
    monkeypatch.setattr(demo_chaos.Chaos, "run", lambda _: chaos)
    faults = ask_json("demo", "--chaos", "--json", "--journal", tmp_path / "journal")
    assert faults == json.loads(json.dumps(chaos.as_json()))

    twin = demo_twin.TwinResult(DemoPlan(sessions=64), answers=1)
    for counter in (twin.why_lost, twin.cut_by):
        counter["some"] = 1
    monkeypatch.setattr(demo_twin.Twin, "run", lambda _: twin)
    sessions = ask_json("demo", "--sessions", 64, "--json")
    assert sessions == json.loads(json.dumps(twin.as_json()))
    texts = [
        shape_text("wavebus demo --json", json_shape(demo)),
        shape_text("wavebus demo --chaos --json", json_shape(faults)),
        shape_text("wavebus demo --sessions --json", json_shape(sessions)),
    ]
    check_snapshot("json_demo.txt", "\n".join(texts))


# -- JSON of the benches: the real code makes the figures; what takes long is replaced. ------------


@pytest.mark.ci
def test_json_of_the_benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bench's command prints these keys. Processes and rounds are replaced by numbers."""
    monkeypatch.setattr(harness.Bench, "launch", _a_worker)
    for replace in (_quick_control, _quick_pause, _quick_transfer, _quick_gap, _quick_rollout):
        replace(monkeypatch)
    monkeypatch.setattr(bench_cli, "find_spec", lambda _: True)  # vLLM need not be installed
    json_and = ("--json", "--rounds", 1)
    bench = [
        ("control", ask_json("bench", "control", *json_and)),
        (
            "control --plain --scale --idle",
            ask_json(
                *("bench", "control", *json_and, "--plain", "--scale", "--idle"),
            ),
        ),
        ("pause", ask_json("bench", "pause", *json_and)),
        ("pause --engine vllm", ask_json("bench", "pause", "--engine", "vllm", *json_and)),
        ("transfer", ask_json("bench", "transfer", *json_and)),
        ("transfer --backend gloo", ask_json("bench", "transfer", "--backend", "gloo", *json_and)),
        ("transfer --gateway", ask_json("bench", "transfer", "--gateway", *json_and)),
        (
            "transfer --engine vllm",
            ask_json("bench", "transfer", "--engine", "vllm", "--device", "cpu", *json_and),
        ),
        (
            "transfer --engine vllm --gateway",
            ask_json(
                *("bench", "transfer", "--engine", "vllm", "--gateway", "--device", "cpu"),
                *json_and,
            ),
        ),
        ("gap", ask_json("bench", "gap", "--picture", tmp_path / "a.png", *json_and)),
        (
            "gap --engine vllm",
            ask_json(
                *("bench", "gap", "--engine", "vllm", "--device", "cpu", "--native-engine"),
                *("other", "--picture", tmp_path / "b.png", *json_and),
            ),
        ),
        ("rollout --vllm", ask_json("bench", "rollout", "--vllm", "--kills", 1, *json_and)),
    ]
    texts = [shape_text(f"wavebus bench {name} --json", json_shape(each)) for name, each in bench]
    check_snapshot("json_bench.txt", "\n".join(texts))


class _Worker:
    """Stands for a process of a bench: it answers at once, always the same."""

    answers: ClassVar[dict[str, Any]] = {
        "round": {"round_ms": 3.0, "pause_ms": 3.0, "engines_ms": 1.0},
        "status": {"cpu_s": 1.0, "rss_bytes": 1_000_000},
    }

    async def hello(self) -> dict[str, Any]:
        url = "http://127.0.0.1:1"
        return {"address": "tcp://127.0.0.1:1", "endpoints": [url], "url": url}

    async def ask(self, method: str, **_: Any) -> Any:
        return self.answers.get(method)

    kill = end = hello


async def _a_worker(*_: Any, **__: Any) -> _Worker:
    return _Worker()


@contextlib.asynccontextmanager
async def _nothing(*_: Any, **__: Any) -> AsyncIterator[None]:
    yield


async def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _quick_control(patch: pytest.MonkeyPatch) -> None:
    async def compare(_: object, plan: ControlPlan) -> dict[str, Any]:
        ways = ("bus", "http", "http_log", "raw", *(("plain",) if plan.plain else ()))
        return control.figures_of(
            {way: [1.0] for way in ways},
            plan.engines,
            1,
            dict.fromkeys(("broker", "http", "raw"), 1.0),
        )

    patch.setattr(control, "compare", compare)
    patch.setattr(control, "raise_file_limit", lambda _: None)
    patch.setattr(control, "_CALM_S", 0.0)
    patch.setattr(control, "_IDLE_S", 0.0)


def _quick_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pause, "_running", _nothing)
    for name in ("_idle", "_warm", "_post", "_all"):
        patch.setattr(pause.RestingDpGroup, name, _do_nothing)


def _quick_transfer(patch: pytest.MonkeyPatch) -> None:
    async def copy() -> dict[str, float]:
        return {"took_ms": 1.0}

    async def update() -> dict[str, float]:
        names = ("update_ms", "transfer_ms", "pause_ms", "paused_ms", "control_ms", "control_share")
        return dict.fromkeys(names, 1.0)

    async def started(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(
            memcpy=copy, two_memcpy=copy, update=update, size_bytes=1_000_000, tensors=1
        )

    async def updates_of(*_: Any) -> Any:
        both = ("update_ms", "put_ms", "send_ms", "receive_ms", "load_ms", "swap_ms")
        routes = ("start_weight_update_ms", "update_weights_ms", "finish_weight_update_ms")
        rounds = {"agent": [dict.fromkeys(both, 1.0)]}
        rounds["gateway"] = [dict.fromkeys((*both, *routes), 1.0)]
        return {"megabytes": 1.0, "tensors": 1, "weights_arrived": True}, rounds

    patch.setattr(transfer, "started", started)
    patch.setattr(gateway_bench, "updates_of", updates_of)
    patch.setattr(fleet, "start_vllm", _updated_engines)
    patch.setattr(EnginesPlan, "check", lambda _: None)


async def _updated_engines(*given: Any) -> Any:
    ways = given[-1]
    return SimpleNamespace(size_bytes=1_000_000, tensors=1, not_compared="", ways=ways)


def _quick_gap(patch: pytest.MonkeyPatch) -> None:
    async def rounds_of(engines: Any, *_: Any, copy: bool = True) -> Measured:
        moves = ["gap_ms", "step_p50_ms", "step_p99_ms", "update_ms"]
        staged = ["swap_ms", "receiving_tokens_per_s", "ratio_throughput_receiving"]
        control = ["control_ms", "control_asks_ms", "control_idle_ms", "control_share"]
        receives = [*moves, "receive_ms", "before_tokens_per_s"]
        names = {"native": receives, "paused": [*receives, "commit_ms"]}
        names["staged"] = [*names["paused"], *staged]
        if not copy:
            sent = [*moves, *control, "window_ms", "transfer_ms"]
            names = dict.fromkeys(engines.ways, sent)
        tokens = [(-20.0, 20.0), (10.0, 20.0), (120.0, 20.0)]
        rounds = {
            way: [UpdateRound(dict.fromkeys(each, 20.0), (20.0, 20.0), 0, tokens, {"load": 1.0})]
            for way, each in names.items()
        }
        return Measured(rounds, [1.0], [1.0], arrived=True)

    patch.setattr(updates, "rounds_of", rounds_of)
    patch.setattr(fleet, "start_embedded", _updated_engines)


def _quick_rollout(patch: pytest.MonkeyPatch) -> None:
    async def boot(self: rollout_bench.RolloutBench) -> list[Any]:
        self._checkpoint = self._address = ""
        return [await self.start_engine()]

    async def wave(_: object, way: str, streams: int, tokens: int, **more: Any) -> dict[str, Any]:
        took = {"wall_s": 1.0, "cpu_s": 1.0, "ttft_ms": [1.0], "live": streams, "rss_mb": 1.0}
        took |= {"front_cpu_s": 1.0, "seams": [["policy-0", 1.0]]}
        return {**took, "tokens": streams * tokens}

    async def front(*_: Any) -> rollout_bench.Front:
        return rollout_bench.Front("", os.getpid())

    async def gateway(*_: Any) -> tuple[str, int]:
        return "", os.getpid()

    async def hits(*_: Any) -> int:
        return 1

    patch.setattr(rollout_bench.RolloutBench, "boot", boot)
    patch.setattr(rollout_bench.RolloutBench, "wave", wave)
    patch.setattr(rollout_bench, "router", front)
    patch.setattr(harness.Bench, "gateway", gateway)
    patch.setattr(rollout_bench, "cache_hits", hits)
    patch.setattr(rollout_bench, "_KILL_AFTER_S", 0)
    patch.setattr(rollout_bench, "find_spec", lambda _: True)
    patch.setattr(rollout_bench, "version", lambda _: "0")


# -- wire, journal and logs ----------------------------------------------------------------------


def _wire() -> Iterator[tuple[type, str]]:
    yield from sorted(WIRE_NAMES.items(), key=lambda each: each[1])


def _own(cls: type) -> list[str]:
    """The lines of a message's own fields, without those of fields of fields."""
    return [line for line in field_lines(cls) if not line.startswith("   ")]


def test_wire() -> None:
    """Every message: its wire name, and its fields with types, bounds and defaults."""
    lines = [
        f"wire version: {WIRE_VERSION}",
        f"largest frame: {MAX_FRAME_BYTES} bytes",
        "",
        "envelope",
        *field_lines(Envelope),
    ]
    for cls, name in _wire():
        lines += ["", name, *field_lines(cls)]
    lines += ["", "NACK codes", *(f"  {code.value}" for code in NackCode)]
    lines += ["", "steps", *(f"  {step.value}" for step in Step)]
    check_snapshot("wire.txt", "\n".join(lines))


def test_journal_records() -> None:
    """Every record's tag and fields. A record is an array, so the order counts, too."""
    lines = [f"magic: {records.MAGIC!r}", f"mark: {records.MARK!r}", f"suffix: {records.SUFFIX}"]
    for cls in records.Record.__args__:
        lines += ["", str(cls.__struct_config__.tag), *field_lines(cls)]
        assert cls.__struct_config__.array_like
    check_snapshot("journal.txt", "\n".join(lines))


def test_log_events() -> None:
    """Every event of a log line with the names of its fields; a line for each set of them.

    ``*`` stands for what is known only at run time.
    """
    calls = LogCalls(product_trees())
    lines = [
        f"{event}: {' '.join(fields)}" if fields else event
        for event, fields in sorted((event, sorted(fields)) for event, fields in calls.lines())
    ]
    assert not [line for line in lines if "?" in line], "an event or a field that can't be followed"
    lines += ["", f"the end of dp_group_*: {type_text(Health)}"]
    lines += ["", "fields on every line of a logger"]
    lines += sorted(f"  {' '.join(sorted(fields))}" for fields in calls.bound())
    check_snapshot("log_events.txt", "\n".join(lines))


# -- Python --------------------------------------------------------------------------------------


def test_python_names() -> None:
    """What the packages export, and what README, docs and examples import from them."""
    packages = product_packages()
    lines: list[str] = []
    for package in packages:
        exported = getattr(importlib.import_module(package), "__all__", [])
        lines += [f"{package} exports: {name}" for name in sorted(exported)]
    used: set[tuple[str, str]] = set()
    for text in _python_of_users():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                package = node.module.partition(".")[0]
                if package in packages:
                    module = importlib.import_module(node.module)
                    for each in node.names:
                        assert hasattr(module, each.name), (node.module, each.name)
                        used.add((package, each.name))
    lines += ["", *(f"users import from {package}: {name}" for package, name in sorted(used))]
    check_snapshot("python_names.txt", "\n".join(lines))


def _python_of_users() -> Iterator[str]:
    """The examples, and the Python blocks of the documents."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            # A block may be a part of a program, such as one with an ellipsis for an argument.
            lines = [line for line in block.splitlines() if line.startswith(("from ", "import "))]
            yield "\n".join(lines)


def test_python_signatures() -> None:
    """The public methods and attributes of the classes that users are handed, and functions."""
    texts = [class_text(cls, product_packages()) for cls in CLASSES]
    texts += [signature_text(name, function) for name, function in sorted(FUNCTIONS.items())]
    texts += ["", *(f"{name}: {type_text(each)}" for name, each in sorted(CHOICES.items()))]
    check_snapshot("python_signatures.txt", "\n".join(texts))


def test_errors() -> None:
    """The tree of errors, what each has, and which NACK becomes which error."""
    lines: list[str] = []
    for cls in _error_classes():
        lines += [f"bases of {cls.__name__}: {', '.join(each.__name__ for each in cls.__bases__)}"]
        lines += [class_text(cls, product_packages())]
    lines += ["codes of engine errors"]
    lines += [f"  {error.code.value}" for error in (EngineError("detail"), EngineDead("detail"))]
    lines += ["", "errors of NACKs, by step and code"]
    for step in ("", Step.PAUSE_LOCAL.value, Step.COMMIT.value):
        for code in NackCode:
            error = type(refusal(_nack(code, step)))
            lines.append(f"  {step or 'no step'}, {code.value}: {error.__name__}")
    check_snapshot("errors.txt", "\n".join(lines))


def test_no_module_path_is_recorded() -> None:
    """No snapshot names a module of the product, since modules move."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in product_files()
    }
    modules = {name for name in modules if "." in name}
    assert annotation_text("bus.messages.Nack | None") == "Nack | None"
    assert plain(errors) == "<module>"
    for path in sorted((ROOT / "tests" / "contract" / "surface").iterdir()):
        words = set(re.findall(r"[A-Za-z_][\w.]*\w", path.read_text(encoding="utf-8")))
        assert not words & modules, path.name
