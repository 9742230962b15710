"""The journal's commands as a user types them, on the journal of a simulated update."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bus._cli.main import run
from bus._journal.reader import read
from bus._journal.records import MAGIC, FileBegan, pack
from bus._journal.spans import spans
from bus._protocol.engine.calls import CallPause
from tests.support.record_hang import HANG
from tests.unit.bus.journal._recorded import ask_status, updated, world_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def data() -> bytes:
    """An update of two engines."""
    world = world_of()
    updated(world)
    return world.journals[0].data()


@pytest.fixture
def journal(tmp_path: Path, data: bytes) -> Path:
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "00000001.journal").write_bytes(data)
    return folder


class Shell:
    """Runs commands; ``out`` and ``err`` are the last one's."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        code = run([str(each) for each in arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    def lines(self, *arguments: object) -> list[dict[str, Any]]:
        assert self(*arguments, "--json") == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def sh(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def test_show_has_every_record(sh: Shell, journal: Path) -> None:
    """A line each; of a file as of its folder."""
    assert sh("journal", "show", journal) == 0
    whole = sh.out
    assert sh("journal", "show", journal / "00000001.journal") == 0
    assert sh.out == whole
    assert len(whole.splitlines()) == len(sh.lines("journal", "show", journal))
    assert "PAUSE_LOCAL to e0, e1" in whole
    assert "one_phase=True" in whole
    assert "step=pause_global" in whole


def test_timers_are_shown_only_where_they_are_asked_for(sh: Shell, journal: Path) -> None:
    """They are most of a quiet broker's records, and say nothing by themselves."""
    shown = sh.lines("journal", "show", journal)
    whole = sh.lines("journal", "show", journal, "--timers")
    assert [each for each in whole if each["what"] != "tick"] == shown
    assert len(whole) > len(shown)
    assert sh("journal", "grep", "timer rang", journal) == 1
    assert sh("journal", "grep", "timer rang", journal, "--timers") == 0


@pytest.mark.parametrize(
    ("filters", "name", "value"),
    [
        (("--message", "commit"), "kind", "COMMIT"),
        (("--message", "group-ack"), "kind", "GROUP_ACK"),
        (("--group", "policy"), "group", "policy"),
        (("--engine", "e0"), "peers", "e0"),
        (("--since", "0.1", "--until", "30", "--message", "ACK", "--engine", "e1"), "sender", "e1"),
    ],
)
def test_filters_leave_what_they_say(
    sh: Shell, journal: Path, filters: tuple[str, ...], name: str, value: str
) -> None:
    """Something, and nothing else."""
    found = sh.lines("journal", "show", journal, *filters)
    assert found
    assert len(found) < len(sh.lines("journal", "show", journal))
    for each in found:
        assert value == each[name] or (name == "peers" and value in each[name])


def test_filters_by_update_and_time(sh: Shell, journal: Path) -> None:
    """An update's messages alone; and those of a span of time, by either clock."""
    whole = sh.lines("journal", "show", journal)
    update = next(e["message"]["update_id"] for e in whole if e.get("kind") == "COMMIT")
    found = sh.lines("journal", "show", journal, "--update", update)
    assert {each["message"]["update_id"] for each in found} == {update}
    assert {"ARM", "PAUSE_LOCAL", "CHUNK_SENT", "RESUME", "ACK"} <= {e["kind"] for e in found}
    early = sh.lines("journal", "show", journal, "--until", "1.0")
    late = sh.lines("journal", "show", journal, "--since", "1.0000001")
    assert early + late == whole
    assert sh.lines("journal", "show", journal, "--since", "1970-01-01T00:00:01.001") == late
    assert sh.lines("journal", "show", journal, "--since", "2030-01-01") == []


def test_grep_finds_lines(sh: Shell, journal: Path) -> None:
    """As grep does, with its exit codes."""
    assert sh("journal", "grep", r"ACK from e1 .*step=(commit|resume)", journal) == 0
    assert len(sh.out.splitlines()) == 2
    assert sh("journal", "grep", "nobody says this", journal) == 1
    assert sh.out == ""
    assert sh("journal", "grep", "(", journal) == 2
    assert "regular expression" in sh.err


def test_what_is_long_is_counted_unless_it_is_asked_for(sh: Shell, tmp_path: Path) -> None:
    """A manifest may have a hundred thousand names, and a group a thousand engines."""
    world = world_of(12)
    updated(world)
    ask_status(world)
    path = tmp_path / "x"
    path.write_bytes(world.journals[0].data())
    assert sh("journal", "show", path, "--message", "COMMIT") == 0
    assert "to e0, e1 and 10 more" in sh.out
    (short,) = sh.lines("journal", "show", path, "--message", "STATUS")
    assert short["message"]["groups"][0]["engines"] == {"entries": 12}
    (full,) = sh.lines("journal", "show", path, "--message", "STATUS", "--full")
    assert len(full["message"]["groups"][0]["engines"]) == 12


def test_replay_says_that_it_is_the_same(sh: Shell, journal: Path) -> None:
    """In words, or as JSON; and with every record."""
    assert sh("replay", journal) == 0
    assert "the same" in sh.out
    assert sh("replay", journal, "--json") == 0
    assert json.loads(sh.out)["same"] is True
    assert sh("replay", journal, "--verbose", "--upto", "20") == 0
    assert len([line for line in sh.out.splitlines() if "<-" in line or "->" in line]) > 5
    assert "peer_joined" in sh.out


def test_a_torn_end_is_told_and_replayed(sh: Shell, journal: Path, data: bytes) -> None:
    """What is there is the same."""
    (journal / "00000001.journal").write_bytes(data[:-3])
    assert sh("replay", journal) == 0
    assert "ends in the middle of a record" in sh.out
    assert sh("journal", "show", journal) == 0
    assert "ends in the middle of a record" in sh.err


def test_damage_is_told_and_not_replayed(sh: Shell, journal: Path, data: bytes) -> None:
    """Shown are all records but the damaged one; a replay ends there, with exit code 1."""
    broken = bytearray(data)
    broken[len(data) // 2] ^= 1
    (journal / "00000001.journal").write_bytes(bytes(broken))
    assert sh("journal", "show", journal) == 0
    assert "damaged" in sh.err
    assert len(sh.out.splitlines()) > 10
    assert sh("replay", journal) == 1
    assert "damaged" in sh.out
    assert sh("why", "--journal", journal) == 1
    assert "damaged" in sh.err


def test_a_journal_without_its_beginning_is_not_replayed(sh: Shell, journal: Path) -> None:
    """It is said what is missing; it can be shown all the same."""
    world = world_of()
    began = world.journals[0].began
    later = FileBegan(began.boot, 3, 700, *(getattr(began, n) for n in began.__struct_fields__[3:]))
    path = journal / "00000001.journal"
    path.write_bytes(MAGIC + b"".join(map(pack, [later, *world.journals[0].records])))
    assert sh("replay", journal) == 1
    assert "begins with record 701" in sh.err
    assert "--journal-bytes" in sh.err
    assert sh.lines("journal", "show", journal, "--timers")[1]["record"] == 701


def test_why_of_a_journal(sh: Shell, tmp_path: Path, journal: Path) -> None:
    """Who the broker waited for when it ended."""
    assert sh("why", "--journal", journal) == 0
    assert sh.out == "nothing is waited for\n"
    world = world_of()
    world.engines["e1"].behaviour.hold.add(CallPause)
    trainer = world.trainers["trainer"]
    trainer.run(trainer.pause(hold_ms=1.0))
    world.run_for(4000.0)
    path = tmp_path / "hang"
    path.write_bytes(world.journals[0].data())
    assert sh("why", "--journal", path) == 0
    assert "e1 has not acked pause_global" in sh.out
    assert sh("why", "--journal", path, "--json") == 0
    (finding,) = json.loads(sh.out)["findings"]
    assert (finding["peer"], finding["state"]) == ("e1", "blocked")


def test_why_says_how_an_update_ended(sh: Shell, journal: Path) -> None:
    (span, *_) = [each for each in spans(read(journal)) if each.version]
    assert sh("why", span.update_id, "--journal", journal) == 0
    assert sh.out == f"{span.update_id} was committed as version 1\n"


def test_trace_writes_a_file(sh: Shell, journal: Path, tmp_path: Path) -> None:
    """And says what is in it; a group that is not there, or a place that can't be, is refused."""
    drawn = tmp_path / "trace.json"
    assert sh("trace", journal, "-o", drawn) == 0
    assert "of 3 peers" in sh.out
    assert json.loads(drawn.read_text())["traceEvents"]
    assert sh("trace", journal, "-o", drawn, "--group", "nobody") == 1
    assert "nobody" in sh.err
    assert sh("trace", journal, "-o", tmp_path / "no" / "where.json") == 2
    assert "--output" in sh.err


@pytest.mark.parametrize(
    "command",
    [
        ("journal", "show"),
        ("journal", "grep", "x"),
        ("replay",),
        ("trace", "-o", "/dev/null"),
        ("why", "--journal"),
    ],
)
def test_what_is_no_journal(sh: Shell, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A file that is missing is wrong usage; one that is something else, or has nothing, fails."""
    assert sh(*command, tmp_path / "missing") == 2
    assert "missing" in sh.err
    other = tmp_path / "other"
    other.write_text("a text of some length that is no journal at all\n")
    assert sh(*command, other) == 1
    assert "not a journal" in sh.err
    assert sh(*command, tmp_path) == 1
    assert "no journal is in this folder" in sh.err
    other.write_bytes(b"")
    if command[0] != "journal":
        assert sh(*command, other) == 1
        assert str(other) in sh.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--since", "yesterday"), "yesterday"),
        (("--message", "NONSENSE"), "NONSENSE"),
        (("--nope",), "--nope"),
    ],
)
def test_wrong_usage(sh: Shell, journal: Path, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 2, and the option's value is named."""
    assert sh("journal", "show", journal, *arguments) == 2
    assert word in sh.err


def test_a_recorded_hang_is_told(sh: Shell) -> None:
    """The one that is in the repository: it is replayed, and who hangs is named. If the broker
    is meant to do something else now, record it anew: see ``tests/support/record_hang.py``."""
    assert sh("replay", HANG) == 0, sh.out
    assert sh("why", "--journal", HANG, "--json") == 0
    (finding,) = json.loads(sh.out)["findings"]
    assert (finding["peer"], finding["step"], finding["state"]) == ("e1", "pause_global", "blocked")
    assert finding["waited_ms"] > 7000


def test_texts_of_peers_do_not_command_the_terminal(sh: Shell, tmp_path: Path) -> None:
    """Of a stranger that has no name a peer may have, say."""
    world = world_of()
    evil = "o\x1b[2J\x9b\u202e\nnext"
    ask_status(world, f"{evil}#1".encode())
    (tmp_path / "00000001.journal").write_bytes(world.journals[0].data())
    for command in (("journal", "show"), ("journal", "grep", "."), ("replay", "--verbose")):
        sh(*command, tmp_path)
        assert "u001b[2J" in sh.out, command
        assert all(line.isprintable() for line in sh.out.splitlines())
