"""A real broker's journal: it outlives the broker, and tells what it did."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from bus._journal.reader import Entry, read
from bus._journal.records import MAGIC, pack
from bus._journal.writer import journal_files
from tests.support.procs import ROOT, Proc, run_wavebus
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.conftest import Bus


@pytest.fixture
def folder(bus: Bus, tmp_path: Path) -> Path:
    """The bus's broker, from now on, records here."""
    folder = tmp_path / "journal"
    restart(bus, folder)
    return folder


def restart(bus: Bus, folder: Path, *extra: str) -> None:
    """The broker is killed, and another one takes its address."""
    bus.broker.kill()
    bus.broker = bus.start_broker(bus.address, "--journal", str(folder), *extra)
    assert bus.broker.first_line() == bus.address


def ask(*arguments: object) -> str:
    """What a command prints that succeeds."""
    done = run_wavebus(*map(str, arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(folder: Path, *filters: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in ask("journal", "show", folder, "--json", *filters).splitlines()
    ]


@pytest.mark.ci
def test_a_broker_that_is_killed_leaves_its_journal(bus: Bus, folder: Path) -> None:
    """Of two lives, the first killed right after a commit: both are replayed; the commit and its
    acks are there, whatever else the broker had in memory."""
    bus.sidecar("e0")
    bus.sidecar("e1")
    weights = load_file(bus.checkpoint.folder / "model.safetensors")
    with SyncTrainerAgent(bus.address, chunk_bytes=20_000) as agent:
        agent.wait_for_engines(2)
        assert agent.update_weights(weights, how="paused") == 1
        bus.broker.kill()
        commits = shown(folder, "--message", "COMMIT")
        assert [(each["what"], each["message"]["version"]) for each in commits][-1] == ("out", 1)
        assert sorted(commits[-1]["peers"]) == ["e0", "e1"]
        acks = [e for e in shown(folder, "--message", "ACK") if e["message"]["step"] == "commit"]
        assert sorted(each["sender"] for each in acks) == ["e0", "e1"]
        first = json.loads(ask("replay", folder, "--json"))
        assert first["same"]
        assert not first["lives"][0]["closed"]

        # It misses nobody who needs a second connection to it, for which a peer waits 6 s.
        restart(bus, folder, "--peer-timeout-ms", "10000")
        for _ in range(3):
            bus.broker.wait_event("peer_joined")
        assert agent.update_weights(weights, how="paused") == 2
    assert bus.broker.stop() == 0
    both = json.loads(ask("replay", folder, "--json"))
    assert both["same"]
    assert [life["closed"] for life in both["lives"]] == [False, True]
    assert all(life["received"] > 30 for life in both["lives"])
    assert "nothing is waited for" in ask("why", "--journal", folder)

    drawn = folder.parent / "trace.json"
    ask("trace", folder, "-o", drawn)
    events = json.loads(drawn.read_text())["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert len(tracks) == 6  # of each life: the trainer and two engines
    spans = [event["name"] for event in events if event["ph"] == "X"]
    for phase in ("pause", "transfer", "commit"):
        assert spans.count(phase) >= 4, phase
    assert spans.count("resume") >= 2  # the first life's may have been in memory when it was killed


@pytest.mark.ci
def test_an_ack_taken_out_is_named(bus: Bus, folder: Path) -> None:
    """A replay says at which record it is missed, who has not acked what, and exits with 1."""
    bus.sidecar("e0")
    bus.sidecar("e1")
    weights = load_file(bus.checkpoint.folder / "model.safetensors")
    with SyncTrainerAgent(bus.address) as agent:
        agent.wait_for_engines(2)
        assert agent.update_weights(weights, how="paused") == 1
    assert bus.broker.stop() == 0
    (path,) = journal_files(folder)
    (ack,) = [
        each["record"]
        for each in shown(folder, "--message", "ACK", "--engine", "e1")
        if each["message"]["step"] == "finish"
    ]
    kept = [i.record for i in read(path) if isinstance(i, Entry) and i.number != ack]
    changed = folder.parent / "changed"
    changed.write_bytes(MAGIC + b"".join(map(pack, kept)))
    done = run_wavebus("replay", str(changed))
    assert done.returncode == 1
    assert "differs at record" in done.stdout
    assert "expected  nothing is sent" in done.stdout
    assert "came      GROUP_ACK to" in done.stdout
    assert "e1 has not acked finish" in done.stdout


@pytest.mark.ci
def test_why_of_a_broker_that_runs(bus: Bus, folder: Path) -> None:
    """Nothing; then the trainer that holds a pause; then an engine that is not heard, by name;
    and the journal of the broker that still runs says the same."""
    bus.sidecar("e0")
    frozen = bus.sidecar("e1")
    assert ask("why", "--broker", bus.address) == "nothing is waited for\n"
    script = ROOT / "tests" / "support" / "held_pause.py"
    trainer = bus.add(Proc(sys.executable, str(script), bus.address))
    assert trainer.first_line() == "paused"
    told = json.loads(ask("why", "--broker", bus.address, "--json"))
    assert told["waiting"]
    (finding,) = told["findings"]
    assert (finding["peer"], finding["state"]) == ("trainer", "trainer")
    assert "trainer" in ask("why", finding["update_id"], "--broker", bus.address)
    assert "nothing is waited for that concerns e0" in ask("why", "e0", "--broker", bus.address)
    assert "called e9" in ask("why", "e9", "--broker", bus.address)

    frozen.signal(signal.SIGSTOP)
    trainer.signal(signal.SIGTERM)
    bus.broker.wait_event("peer_lost", peer="e1")
    gone = json.loads(ask("why", "e1", "--broker", bus.address, "--json"))
    assert not gone["waiting"]
    assert [each["state"] for each in gone["findings"]] == ["dead"]
    assert "was not heard" in gone["findings"][0]["text"]
    frozen.signal(signal.SIGCONT)
    bus.broker.wait_event("peer_joined", peer="e1")
    ask("replay", folder)


def test_a_broker_needs_a_folder_of_its_own(bus: Bus, folder: Path) -> None:
    """Another one is told so, with exit code 2, and listens nowhere."""
    done = run_wavebus("broker", "--listen", "tcp://127.0.0.1:*", "--journal", str(folder))
    assert done.returncode == 2
    assert "another broker" in done.stderr
    assert done.stdout == ""
    settings = {"WAVEBUS_JOURNAL": str(bus.checkpoint.folder / "model.safetensors")}
    done = run_wavebus("broker", "--listen", "tcp://127.0.0.1:*", env=settings)
    assert done.returncode == 2
    assert "--journal" in done.stderr
