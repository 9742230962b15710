"""Whatever happens to a group, the broker's journal says again what the broker did; and a
commit is flushed before it leaves."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from bus._journal.records import FrameReceived, FrameSent
from bus._journal.render import as_json, decode_frame, line
from bus._journal.replay import Unplayable, replay_lives
from bus._journal.spans import spans
from bus.messages import Ack, Commit, Step
from tests.model import test_sleep_model, test_whole_model
from tests.model._play import Play, Schedule, play_all, reached, schedules

if TYPE_CHECKING:
    from collections import Counter

    from bus._journal.reader import Entry
    from bus._journal.replay import Difference

KINDS = test_whole_model.KINDS + test_sleep_model.KINDS


class Recorded(Play):
    """At its end, every broker's journal is replayed: whole, and with an ack taken out."""

    def __init__(self, schedule: Schedule, reach: Counter[str]) -> None:
        super().__init__(schedule, reach)
        self._to_client = self.world.network.send_to_client
        self.world.network.send_to_client = self._look  # type: ignore[method-assign]

    def end(self) -> None:
        super().end()
        entries = [entry for journal in self.world.journals for entry in journal.entries()]
        found, notes = _replay(entries)
        assert found is None, f"{found}\n{self.story()}"
        assert all(line(entry) and as_json(entry) for entry in entries)
        for each in spans(entries):
            assert each.begin_ms <= each.end_ms
        self.reach["records replayed"] += len(entries)
        self.reach["notes replayed"] += notes
        self.reach["lives replayed"] += len(self.world.journals)
        self._take_one_out(entries)

    def _take_one_out(self, entries: list[Entry]) -> None:
        """Of the last COMMIT, which all engines have acked: without any of the acks there is no
        answer to the trainer."""
        acks = [index for index, entry in enumerate(entries) if _is_commits_ack(entry)]
        last = [index for index in acks if _about(entries[index]) == _about(entries[acks[-1]])]
        if len(last) > len({_sender(entries[index]) for index in last}):
            return  # one was sent twice, and will not be missed
        taken = random.Random(self.schedule.seed).choice(last)
        found, _ = _replay(entries[:taken] + entries[taken + 1 :])
        assert found is not None, f"{line(entries[taken])} was not missed"
        assert found.entry.number > entries[taken].number
        self.reach["ack missed"] += 1

    def _look(self, route: bytes, frame: bytes) -> bool:
        """A COMMIT leaves: what was asked of the broker is on disk."""
        journal = self.world.journals[-1]
        record = journal.records[-1]
        if isinstance(record, FrameSent) and isinstance(decode_frame(record).message, Commit):
            asked = max(
                number
                for number, each in enumerate(journal.records, 1)
                if isinstance(each, FrameReceived)
                and isinstance(decode_frame(each).message, Commit)
            )
            assert journal.flushed >= asked, "a COMMIT leaves, and is on no disk"
            self.reach["commit flushed"] += 1
        return self._to_client(route, frame)


def _replay(entries: list[Entry]) -> tuple[Difference | None, int]:
    notes = 0
    for each in replay_lives(entries):
        assert not isinstance(each, Unplayable), each.reason
        notes += len(each[1].notes)
        if each[1].difference is not None:
            return each[1].difference, notes
    return None, notes


def _is_commits_ack(entry: Entry) -> bool:
    if not isinstance(entry.record, FrameReceived):
        return False
    message = decode_frame(entry.record).message
    return isinstance(message, Ack) and message.step is Step.COMMIT


def _about(entry: Entry) -> str:
    """The update of an ack."""
    assert isinstance(entry.record, FrameReceived)
    return decode_frame(entry.record).update_id


def _sender(entry: Entry) -> bytes:
    assert isinstance(entry.record, FrameReceived)
    return entry.record.route


def test_a_journal_says_again_what_the_broker_did() -> None:
    """In every schedule, over all lives of the broker."""
    reach = play_all(80, schedules(KINDS, most=10), Recorded)
    reached(
        reach,
        {
            "records replayed": 20_000,
            "notes replayed": 2_000,
            "lives replayed": 80,
            "ack missed": 60,
            "commit flushed": 150,
            "committed": 80,
        },
    )
