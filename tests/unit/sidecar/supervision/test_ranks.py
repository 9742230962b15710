"""What each rank of a DP group is started with, and that all end when one does."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from bus._vllm.source import SourceTree
from bus.errors import EngineError, UsageError
from sidecar._supervision.launch import free_port
from sidecar._supervision.ranks import (
    RankLaunchPlan,
    RankSupervisor,
    parse_server_command,
    serving_host,
    visible_gpus,
    with_sync_interval,
)

OPTIONS = ("--broker", "tcp://127.0.0.1:1", "--group", "policy")


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_server_gets_vllms_own_options() -> None:
    """Rank, size and rendezvous; the port of rank r stands r after rank 0's."""
    plan = RankLaunchPlan("moe", 2, OPTIONS, ("python", "-m", "server"), port=8000)
    words = plan.argv(1, 29500)
    assert after(words, "--name") == "moe-1"
    assert after(words, "--dp-group") == "moe"
    server = words[words.index("--") + 1 :]
    assert server[:3] == ["python", "-m", "server"]
    assert after(server, "--data-parallel-size") == "2"
    assert after(server, "--data-parallel-rank") == "1"
    assert after(server, "--data-parallel-rpc-port") == "29500"
    assert after(server, "--port") == "8001"
    assert "--data-parallel-external-lb" in server
    assert "--dp-size" not in words


class OfConfig(SourceTree):
    """A vLLM whose parallel configuration has these fields."""

    def __init__(self, fields: str) -> None:
        super().__init__(Path("nowhere"), {"vllm/config/parallel.py": fields})


@pytest.mark.parametrize(
    ("command", "vllm", "added"),
    [
        (("python",), OfConfig("dp_sync_interval: int = 16"), ("--dp-sync-interval", "4")),
        (("python",), OfConfig("something_else: int"), ()),
        (("python",), None, ()),
        (("python", "--dp-sync-interval=16"), OfConfig("dp_sync_interval"), ()),
        (("python", "--dp_sync_interval", "2"), OfConfig("dp_sync_interval"), ()),
    ],
)
def test_ranks_agree_more_often_unless_told(
    command: tuple[str, ...], vllm: SourceTree | None, added: tuple[str, ...]
) -> None:
    """If this vLLM knows the option."""
    assert with_sync_interval(command, vllm) == (*command, *added)


def test_an_embedded_rank_gets_the_sidecars_options() -> None:
    """And a free port of its own, if none was asked for."""
    words = RankLaunchPlan("moe", 3, OPTIONS).argv(2, 29500)
    assert after(words, "--dp-rank") == "2"
    assert after(words, "--dp-size") == "3"
    assert after(words, "--dp-master") == "127.0.0.1:29500"
    assert "--port" not in words


@pytest.mark.parametrize(
    "word", ["--data-parallel-rank", "--data-parallel-size=2", "-dp", "--data-parallel-address"]
)
def test_a_command_that_chooses_ranks_itself_is_refused(word: str) -> None:
    """By its option's name."""
    with pytest.raises(UsageError, match=word.partition("=")[0]):
        parse_server_command(["python", word, "0"])


@pytest.mark.parametrize("given", [["--port", "9000"], ["--port=9000"]])
def test_the_port_of_a_command_is_rank_0s(given: list[str]) -> None:
    """It is taken out, since every rank gets its own."""
    assert parse_server_command(["serve", *given, "--x", "1"]) == (("serve", "--x", "1"), 9000)


def test_a_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="--port http"):
        parse_server_command(["serve", "--port", "http"])


def test_gpus_are_shared_out() -> None:
    """Evenly; too few are refused, none change nothing."""
    plan = RankLaunchPlan("moe", 2, OPTIONS, ("serve",), gpus=("4", "5", "6", "7"))
    assert plan.environment(0) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert plan.environment(1) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert RankLaunchPlan("moe", 2, OPTIONS).environment(1) == {}
    with pytest.raises(UsageError, match="1 GPUs"):
        RankLaunchPlan("moe", 2, OPTIONS, gpus=("0",))


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert visible_gpus() == ("2", "GPU-abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


class Scripted(RankLaunchPlan):
    """Ranks that run a line of Python instead of a sidecar."""

    def __init__(self, size: int, script: str, serves_at: str = "") -> None:
        super().__init__("moe", size, (), serves_at=serves_at)
        object.__setattr__(self, "script", script)

    def argv(self, rank: int, meeting_port: int, chosen_port: int = 0) -> list[str]:
        script: str = self.script  # type: ignore[attr-defined]
        return [sys.executable, "-c", script, str(rank), str(meeting_port), str(chosen_port)]


WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); signal.pause()"


def run(plan: RankLaunchPlan, *, restarts: int, until: Path | None = None) -> RankSupervisor:
    """Until it gives up; or until a file is there, which a rank writes."""

    async def supervise() -> RankSupervisor:
        stop = asyncio.Event()
        supervisor = RankSupervisor(plan, restarts=restarts)
        running = asyncio.create_task(supervisor.run(stop))
        while until is not None and not until.exists() and not running.done():  # noqa: ASYNC240 - of this test
            await asyncio.wait([running], timeout=0.02)
        if until is not None:
            stop.set()
        await asyncio.wait_for(running, 60)
        return supervisor

    return asyncio.run(supervise())


def test_ranks_are_started_anew_together(tmp_path: Path) -> None:
    """One dies in each of the first two lives; the others are ended with it, and in the
    third life all stand. Each life has a rendezvous of its own."""
    there = tmp_path / "there"
    script = f"""
import pathlib, sys
rank, port, _ = sys.argv[1:]
folder = pathlib.Path({str(tmp_path)!r})
life = len(list(folder.glob("life-0-*"))) if rank == "0" else 0
(folder / f"life-{{rank}}-{{port}}-{{id(folder)}}").touch()
if rank == "0" and life < 2:
    raise SystemExit(4)
if rank == "0":
    pathlib.Path({str(there)!r}).touch()
{WAITS}
"""
    supervisor = run(Scripted(2, script), restarts=3, until=there)
    assert supervisor.generation == 3
    assert len(list(tmp_path.glob("life-0-*"))) == 3


def test_ranks_keep_their_ports_over_restarts(tmp_path: Path) -> None:
    """Firewalls and clients may name them. A port that another process has taken is given up."""
    there = tmp_path / "there"
    script = f"""
import pathlib, socket, sys
rank, _, port = sys.argv[1:]
folder = pathlib.Path({str(tmp_path)!r})
life = len(list(folder.glob("life-*")))
(folder / f"life-{{life}}").write_text(port)
server = socket.create_server(("127.0.0.1", int(port)))
client = socket.create_connection(("127.0.0.1", int(port)))
server.accept()[0].close()  # it lingers at this port
if life < 2:
    raise SystemExit(4)
pathlib.Path({str(there)!r}).touch()
{WAITS}
"""
    run(Scripted(1, script, "127.0.0.1"), restarts=3, until=there)
    ports = {(tmp_path / f"life-{life}").read_text() for life in range(3)}
    assert len(ports) == 1
    with socket.create_server(("127.0.0.1", int(*ports))):
        assert free_port(wanted=int(*ports)) != int(*ports)


@pytest.mark.parametrize(
    ("command", "host"),
    [
        ((), "::1"),
        (("serve", "m"), "127.0.0.1"),
        (("serve", "--host", "0.0.0.0", "m"), "0.0.0.0"),
        (("serve", "--host=::"), "::"),
        (("serve", "--port", "81"), ""),
        (("serve", "--port=81", "--host=::"), ""),
        (("serve", "--uds", "/x"), ""),
    ],
)
def test_where_a_port_must_be_free(command: tuple[str, ...], host: str) -> None:
    assert serving_host(command, "::1") == host


def test_a_chosen_port_is_given_to_the_engine() -> None:
    alone = RankLaunchPlan("e0", 1, OPTIONS, ("serve", "m"), serves_at="127.0.0.1")
    assert alone.argv(0, 1, 8123)[-4:] == ["serve", "m", "--port", "8123"]
    embedded = RankLaunchPlan("e0", 1, OPTIONS, serves_at="127.0.0.1")
    assert embedded.argv(0, 1, 8123)[-2:] == ["--port", "8123"]
    assert "--port" not in embedded.argv(0, 1)


def test_it_gives_up_after_so_many_deaths_in_a_row() -> None:
    """With the rank that died, and how."""
    with pytest.raises(EngineError, match=r"died 2 times in a row.*rank 1 \(exit code 7\)"):
        run(Scripted(2, f"import sys\nif sys.argv[1] == '1': exit(7)\n{WAITS}"), restarts=1)


def test_wrong_options_are_not_tried_again() -> None:
    """Exit code 2 says that the next try would end alike."""
    with pytest.raises(UsageError, match="rank 0 refused its options"):
        run(Scripted(1, "exit(2)"), restarts=5)
