"""A supervised server: its command line, and that nothing of it is ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import bus.log
from bus.errors import EngineDead, EngineError, UsageError
from sidecar._supervision import reaper as guard_module
from sidecar._supervision.server import SupervisedServer, complete_command
from sidecar._vllm.plugin.front_end import DataRoutesOnly
from tests.support.processes import descendants, runs

if TYPE_CHECKING:
    from collections.abc import Coroutine

COMMAND = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
ROOT = Path(__file__).resolve().parents[4]
STAND_IN = [sys.executable, str(Path(__file__).with_name("_server.py"))]


def test_what_is_missing_is_added() -> None:
    """Loopback, a free port, the backend, the token route and the RL routes."""
    prepared = complete_command(COMMAND, {"A": "b"})
    port = prepared.base_url.rpartition(":")[2]
    assert prepared.argv == (
        *COMMAND,
        *("--host", "127.0.0.1", "--port", port),
        *("--weight-transfer-config", '{"backend": "wavebus"}', "--enable-scale-out"),
    )
    assert prepared.base_url == f"http://127.0.0.1:{port}"
    assert prepared.env == {"A": "b", "VLLM_SERVER_DEV_MODE": "1"}


def test_lora_adapters_may_be_updated() -> None:
    """Where the server takes any, and nobody has said otherwise."""
    switch = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    for option in ("--enable-lora", "--enable_lora"):
        assert complete_command([*COMMAND, option], {}).env[switch] == "1"
        assert complete_command([*COMMAND, option], {switch: "0"}).env[switch] == "0"
    assert switch not in complete_command(COMMAND, {}).env


@pytest.mark.parametrize(
    ("options", "url"),
    [
        (["--host", "localhost", "--port", "81"], "http://localhost:81"),
        (["--host=::1", "--port=82"], "http://[::1]:82"),
    ],
)
def test_what_is_given_stays(options: list[str], url: str) -> None:
    """In either form, with hyphens or underscores."""
    given = [*COMMAND, *options, '--weight_transfer_config={"backend":"wavebus"}']
    prepared = complete_command([*given, "--no-enable-scale-out"], {})
    assert prepared.argv == (*given, "--no-enable-scale-out")
    assert prepared.base_url == url
    vllms_own = ["--weight-transfer-config", '{"backend": "nccl"}']
    assert complete_command([*COMMAND, *vllms_own], {}).argv.count("--weight-transfer-config") == 1
    dotted = complete_command([*COMMAND, "--weight-transfer-config.backend", "wavebus"], {})
    assert "--weight-transfer-config" not in dotted.argv


@pytest.mark.parametrize(
    ("options", "env", "text"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0.*VLLM_API_KEY"),
        (["--host=example.org"], {}, "--host example.org.*VLLM_API_KEY"),
        (
            ["--host", "::", "--api-key", "k"],
            {"VLLM_USE_RUST_FRONTEND": "1"},
            "--host ::.*VLLM_USE_RUST_FRONTEND",
        ),
        (["--port", "http"], {}, "--port http"),
        (["--uds", "/tmp/x"], {}, "--uds"),
        (["--weight-transfer-config", '{"backend": "sharded_rdt"}'], {}, "'sharded_rdt'.* plans"),
        (["--weight-transfer-config", "nccl"], {}, "JSON"),
        (["--weight-transfer-config.backend", "sharded_rdt"], {}, "'sharded_rdt'.* pull shards"),
        ([], {"VLLM_SERVER_DEV_MODE": "0"}, "VLLM_SERVER_DEV_MODE=0"),
    ],
)
def test_contradictions_are_usage_errors(
    options: list[str], env: dict[str, str], text: str
) -> None:
    """Each names the option."""
    with pytest.raises(UsageError, match=text):
        complete_command([*COMMAND, *options], env)
    with pytest.raises(UsageError, match="no command"):
        complete_command([], {})


@pytest.mark.parametrize(
    ("options", "env", "key"),
    [
        (["--api-key", "k1", "k2"], {"VLLM_API_KEY": "k3"}, "k1"),
        ([], {"VLLM_API_KEY": "k3"}, "k3"),
        ([], {"WAVEBUS_INSECURE": "1"}, ""),
    ],
)
@pytest.mark.parametrize(
    ("host", "here", "there"),
    [
        ("0.0.0.0", "http://127.0.0.1:81", "http://0.0.0.0:81"),
        ("::", "http://[::1]:81", "http://[::]:81"),
        ("10.0.0.7", "http://10.0.0.7:81", "http://10.0.0.7:81"),
    ],
)
def test_other_hosts_get_data_routes_alone(
    options: list[str], env: dict[str, str], key: str, host: str, here: str, there: str
) -> None:
    """By a middleware that sees a request before any other one does."""
    argv = [*COMMAND, "--host", host, "--port", "81", "--middleware", "a.B", *options]
    prepared = complete_command(argv, env)
    assert (prepared.base_url, prepared.endpoint, prepared.api_key) == (here, there, key)
    places = [at for at, argument in enumerate(prepared.argv) if argument == "--middleware"]
    module, _, name = prepared.argv[places[-1] + 1].rpartition(".")
    assert getattr(importlib.import_module(module), name) is DataRoutesOnly
    assert len(places) == 2
    assert "--middleware" not in complete_command([*COMMAND, "--api-key", "k"], {}).argv


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


@pytest.mark.parametrize("how", ["willing", "stubborn"])
def test_stop_ends_the_whole_group(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With SIGTERM, or with SIGKILL after the grace."""

    async def scenario() -> None:
        grace_s = 0.3 if how == "stubborn" else 60.0
        async with SupervisedServer([*STAND_IN, how], grace_s=grace_s) as server:
            family = descendants(server.pid)
            assert len(family) == 2
        assert not [pid for pid in family if runs(pid)]
        ended = "exit code 137" if how == "stubborn" else "exit code 143"
        assert ended in await server.wait_for_exit()

    run(scenario())
    assert "vllm| " in capfd.readouterr().err


def test_a_dead_engine_is_not_waited_for() -> None:
    """Its core is gone: what is left of the server may hang, and has no request to finish."""

    async def scenario() -> None:
        server = SupervisedServer([*STAND_IN, "stubborn"], grace_s=600.0)
        await server.start()
        family = descendants(server.pid)
        await server.stop(at_once=True)
        assert not [pid for pid in family if runs(pid)]
        assert "exit code 137" in await server.wait_for_exit()

    run(scenario())


@pytest.mark.parametrize("level", ["info", "debug"])
def test_questions_for_its_health_are_shown_to_who_debugs(
    level: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come four times a second while it boots, and then every two seconds."""
    monkeypatch.setattr(bus.log, "_settings", bus.log._settings)
    bus.log.configure(level=level)

    async def scenario() -> None:
        async with SupervisedServer(STAND_IN, grace_s=0.3):
            pass

    run(scenario())
    shown = capfd.readouterr().err
    assert "vllm| serving" in shown
    assert ("/health" in shown) == (level == "debug")


def test_a_server_runs_on_where_its_output_can_not_be_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a full disk: somebody must go on reading its output, or it waits at its next line."""

    async def scenario() -> None:
        async with SupervisedServer([*STAND_IN, "loud"]):
            pass

    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - its end fails as well
    monkeypatch.setattr(sys, "stderr", full)
    run(scenario())
    with contextlib.suppress(OSError):
        full.close()


def test_death_is_reported_and_its_children_go_with_it() -> None:
    """Even by SIGKILL."""

    async def scenario() -> None:
        server = SupervisedServer(STAND_IN)
        await server.start()
        family = descendants(server.pid)
        exited = asyncio.create_task(server.wait_for_exit())
        os.kill(family[0], signal.SIGKILL)
        assert "exit code 137" in await exited
        assert not [pid for pid in family if runs(pid)]
        await server.stop()
        with pytest.raises(EngineError, match="only once"):
            await server.start()

    run(scenario())


def test_a_failed_boot_shows_the_last_lines() -> None:
    """They say more than an exit code."""

    async def scenario() -> None:
        with pytest.raises(EngineDead, match=r"exit code 1; its last lines:\nloading\nno such"):
            await SupervisedServer([*STAND_IN, "broken"]).start()
        with pytest.raises(EngineDead, match=r"exit code 127(.|\n)*can't start /no/such"):
            await SupervisedServer(["/no/such/program"]).start()

    run(scenario())


def test_a_server_that_never_gets_healthy_is_stopped() -> None:
    """Within the bound, with nothing left."""
    command = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]

    async def scenario() -> None:
        server = SupervisedServer(command, ready_timeout_s=0.5)
        with pytest.raises(EngineError, match=r"not healthy within 0\.5 s"):
            await server.start()
        assert "exit code" in await server.wait_for_exit()

    run(scenario())


@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_nothing_outlives_a_kill(victim: str, tmp_path: Path) -> None:
    """SIGKILL leaves no time to tidy up; the kernel tells who is left."""
    program = tmp_path / "supervisor.py"
    program.write_text(
        "import asyncio, sys\n"
        "from sidecar._supervision.server import SupervisedServer\n"
        "async def main():\n"
        "    server = SupervisedServer(sys.argv[1:])\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await server.wait_for_exit()\n"
        "asyncio.run(main())\n"
    )

    async def scenario() -> None:
        supervisor = await asyncio.create_subprocess_exec(
            *(sys.executable, str(program), *STAND_IN),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert supervisor.stdout is not None
        guard = int(await supervisor.stdout.readline())
        family = descendants(guard)
        if victim == "supervisor":
            supervisor.kill()
            left = family
        else:
            os.kill(guard, signal.SIGKILL)
            left = family[:1]  # the server itself; its children have no guard any more
        await supervisor.wait()
        while any(map(runs, left)):  # noqa: ASYNC110 - the kernel offers no event
            await anyio.sleep(0.02)
        for pid in filter(runs, family):
            os.kill(pid, signal.SIGKILL)

    run(scenario())


HOLDS = """
import mmap, os, signal, sys
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
tracked = SharedMemory(create=True, size=64)
names = [tracked.name, "vllm_dist_" + tracked.name, "own_" + tracked.name]
mapped = []
for name in names[1:]:
    file = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.truncate(file, 64)
    mapped.append(mmap.mmap(file, 64))
print(*names, flush=True)
signal.pause()
"""


def test_a_killed_server_leaves_no_name_in_shared_memory(tmp_path: Path) -> None:
    """Neither one that Python has tracked nor one that vLLM made in C++. What is not known to be
    nobody else's stays."""
    shared = Path("/dev/shm")
    program = tmp_path / "holds.py"
    program.write_text(HOLDS)

    async def scenario() -> None:
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(guard_module.__file__))),
            *(str(os.getpid()), "0.1", sys.executable, str(program)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert guard.stdout is not None
        tracked, untracked, unknown = (await guard.stdout.readline()).decode().split()
        assert all((shared / name).exists() for name in (tracked, untracked, unknown))
        guard.terminate()
        await guard.wait()
        assert not (shared / tracked).exists()
        assert not (shared / untracked).exists()
        (shared / unknown).unlink()

    run(scenario())


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_reaper_that_was_stopped_ends_when_it_is_told_to_meanwhile() -> None:
    """Of a stopped process, any thread may receive the signal. So half of them would miss it, if a
    second thread watched the command."""

    async def scenario() -> None:
        program = "import signal; print(flush=True); signal.pause()"
        guards = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, str(Path(guard_module.__file__))),
                *(str(os.getpid()), "60", sys.executable, "-c", program),
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(8)
        ]
        for guard in guards:
            assert guard.stdout is not None
            await guard.stdout.readline()
            guard.send_signal(signal.SIGSTOP)
            while not is_stopped(guard.pid):  # noqa: ASYNC110 - the kernel offers no event
                await anyio.sleep(0.01)
            guard.terminate()
            guard.send_signal(signal.SIGCONT)
        try:
            codes = await asyncio.wait_for(asyncio.gather(*(each.wait() for each in guards)), 60)
        finally:
            for guard in guards:
                if guard.returncode is None:
                    guard.kill()
        assert codes == [128 + signal.SIGTERM] * len(guards)

    run(scenario())
