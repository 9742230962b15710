"""The fault matrix: who fails, at which step, in which way; and what may come of it.

The steps are points of the protocol: the moment at which a message of one kind is on its way,
held by the proxy, while somebody fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from bus.messages import Ack, GroupAck, Join, PauseGlobal, Probed, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.links import Passing

    # Of a message, whether it is the one; of which engine, and in how many chunks the update goes.
    Moment: TypeAlias = "Callable[[Passing, str, int], bool]"

# What fails, as a name of :class:`tests.faults.world.World`. An embedded engine lives in its
# sidecar's process. So "sidecar" is one with an engine of its own, and "engine" is one of two that
# step in lockstep, each with a sidecar: what it leaves behind is a mate in a collective.
ACTORS: Final = {
    "broker": "broker",
    "sidecar": "e0",
    "engine": "m-1",
    "rank0": "trainer-0",
    "rank1": "trainer-1",
}
FAULTS: Final = {
    "sigkill": "its process gets SIGKILL, and is started again later",
    "sigstop": "its process gets SIGSTOP, and SIGCONT after more than the lease",
    "cut": "its link is cut: the connection drops, and new ones are refused",
    "mute": "its link is cut one way: nothing that it says arrives, and the connection stands",
    "deaf": "its link is cut the other way: nothing reaches it, and the connection stands",
}
PAGE: Final = Path(__file__).resolve().parents[2] / "docs/faults.md"


def _ack(step: Step) -> Moment:
    def moment(passing: Passing, engine: str, _chunks: int) -> bool:
        said = passing.message
        return passing.peer == engine and isinstance(said, Ack) and said.step is step

    return moment


def _chunk(which: Callable[[int], int]) -> Moment:
    applied = _ack(Step.CHUNK)

    def moment(passing: Passing, engine: str, chunks: int) -> bool:
        said = passing.message
        of_it = isinstance(said, Ack) and said.chunk == which(chunks)
        return of_it and applied(passing, engine, chunks)

    return moment


def _group_ack(step: Step) -> Moment:
    def moment(passing: Passing, _engine: str, _chunks: int) -> bool:
        return isinstance(passing.message, GroupAck) and passing.message.step is step

    return moment


def _joins(passing: Passing, who: str, _chunks: int) -> bool:
    return isinstance(passing.message, Join) and passing.peer == who


def _probed(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, Probed) and passing.peer == engine


def _asked_globally(passing: Passing, engine: str, _chunks: int) -> bool:
    return isinstance(passing.message, PauseGlobal) and passing.peer == engine


# Each step, and the message that is caught: the ack of the engine that fails, or, if none does, of
# the first one. (For the step "join" the broker is restarted, and its peers join again.)
STEPS: Final[dict[str, Moment]] = {
    "join": _joins,
    "first_pause_ack": _ack(Step.PAUSE_LOCAL),
    "locally_paused": _asked_globally,
    "globally_paused": _group_ack(Step.PAUSE_GLOBAL),
    "armed": _group_ack(Step.ARM),
    "first_chunk": _chunk(lambda _: 0),
    "middle_chunk": _chunk(lambda chunks: chunks // 2),
    "last_chunk": _chunk(lambda chunks: chunks - 1),
    "finish": _ack(Step.FINISH),
    "canary": _probed,
    "commit": _ack(Step.COMMIT),
    "resume": _ack(Step.RESUME),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the matrix, in which all engines are embedded; or, with a ``scene``, of those on real
    vLLM."""

    actor: str
    fault: str
    step: str
    scene: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.scene, self.actor, self.fault, self.step)))

    @property
    def peer(self) -> str:
        """Who fails, or whose process; as a name of :class:`tests.faults.world.World`."""
        return (VLLM_ACTORS[self.scene] if self.scene else ACTORS)[self.actor]


CELLS: Final = tuple(
    Cell(actor, fault, step) for actor in ACTORS for fault in FAULTS for step in STEPS
)


# With every actor and every fault among them: those of every test run.
SHARE: Final = (
    Cell("broker", "sigkill", "join"),
    Cell("sidecar", "sigstop", "first_pause_ack"),
    Cell("engine", "sigkill", "last_chunk"),
    Cell("rank0", "deaf", "finish"),
    Cell("sidecar", "mute", "canary"),
    Cell("rank1", "cut", "commit"),
)

# Scenes in which some engines are vLLM servers, each with a sidecar that supervises it: in "vllm"
# the engine alone, in "vllm_dp" the two ranks in lockstep. The others stay embedded. vLLM has
# processes of its own that fail while the sidecar lives: the API server, and the engine core.
VLLM_ACTORS: Final = {
    "vllm": {
        "broker": "broker",
        "sidecar": "e0",
        "server": "e0",
        "core": "e0",
        "rank0": "trainer-0",
        "rank1": "trainer-1",
    },
    "vllm_dp": {
        "broker": "broker",
        "sidecar": "m-1",
        "server": "m-1",
        "core": "m-1",
        "rank0": "trainer-0",
    },
}
# Processes of vLLM's: they have no link to the broker, and are started anew by who supervises them.
OF_VLLM: Final = frozenset({"server", "core"})
VLLM_CELLS: Final = (
    Cell("broker", "sigkill", "join", "vllm"),
    Cell("rank1", "deaf", "armed", "vllm"),
    Cell("sidecar", "cut", "first_pause_ack", "vllm"),
    Cell("sidecar", "sigstop", "globally_paused", "vllm"),
    Cell("core", "sigstop", "first_chunk", "vllm"),
    Cell("server", "sigstop", "locally_paused", "vllm"),
    Cell("rank0", "sigkill", "middle_chunk", "vllm"),
    Cell("broker", "mute", "finish", "vllm"),
    Cell("sidecar", "sigkill", "last_chunk", "vllm"),
    Cell("core", "sigkill", "middle_chunk", "vllm"),
    Cell("server", "sigkill", "commit", "vllm"),
    Cell("rank0", "sigkill", "middle_chunk", "vllm_dp"),
    Cell("sidecar", "mute", "resume", "vllm_dp"),
    Cell("broker", "sigkill", "locally_paused", "vllm_dp"),
    Cell("sidecar", "sigstop", "first_pause_ack", "vllm_dp"),
    Cell("core", "sigkill", "globally_paused", "vllm_dp"),
    Cell("sidecar", "sigkill", "first_chunk", "vllm_dp"),
    Cell("core", "sigstop", "resume", "vllm_dp"),
    Cell("server", "sigkill", "commit", "vllm_dp"),
)
# One of each scene, with no engine to boot a second time: those of every test run.
VLLM_SHARE: Final = (
    Cell("sidecar", "sigstop", "globally_paused", "vllm"),
    Cell("rank0", "sigkill", "middle_chunk", "vllm_dp"),
)


# What comes of the update that a fault meets: a letter, what it means, and how the update may end
# (see :meth:`tests.faults.cell.Play.run`).
OUTCOMES: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "C": (
        "committed on all engines",
        frozenset({"committed"}),
    ),
    "W": (
        (
            "committed without who failed, and its mate in lockstep, unless they have done all of "
            "it; the next update brings them back"
        ),
        frozenset({"committed"}),
    ),
    "G": (
        (
            "given up before anything was loaded: an error that names who failed; all who are "
            "there resume the old version"
        ),
        frozenset({"failed"}),
    ),
    "E": (
        (
            "ends with an error for the trainer, if that lives: who has committed serves the new "
            "version, who has loaded nothing resumes the old one, who holds a part is quarantined "
            "until the next update"
        ),
        frozenset({"failed", "gone"}),
    ),
    "X": (
        "one of these: a message under way, or a deadline, is overtaken by the fault or is not",
        frozenset({"committed", "failed", "gone"}),
    ),
}
_BEFORE_THE_PAUSE_IS_MADE: Final = frozenset({"armed", "first_pause_ack", "locally_paused"})
_BEFORE_ALL_IS_SENT: Final = _BEFORE_THE_PAUSE_IS_MADE | {
    "globally_paused",
    "first_chunk",
    "middle_chunk",
}
_BEFORE_THE_COMMIT: Final = _BEFORE_ALL_IS_SENT | {"last_chunk", "finish", "canary"}


def outcome_of(cell: Cell) -> str:
    """The letter of what must come of the update. (At a join, it is begun after the fault.)"""
    if cell.step == "join":
        return "X"
    match cell.actor:
        case "rank1":
            return "C"
        case "sidecar" | "engine" | "server" | "core":
            if cell.step in _BEFORE_THE_PAUSE_IS_MADE:
                return "G"
            return "X" if cell.fault == "deaf" else "W"
        case "rank0" if cell.fault == "sigkill":
            return "E"
        case "rank0" if cell.fault != "deaf":
            return "E" if cell.step in {*_BEFORE_ALL_IS_SENT, "canary"} else "X"
        case _:
            return "E" if cell.step in _BEFORE_THE_COMMIT else "X"


def _matrix() -> str:
    """What comes of the update, of each cell."""
    steps = list(STEPS)
    lines: list[str] = []
    for actor in ACTORS:
        head = " | ".join(step.replace("_", " ") for step in steps)
        lines += ["", f"| {actor} | {head} |", "|---" * (len(steps) + 1) + "|"]
        for fault in FAULTS:
            letters = [outcome_of(Cell(actor, fault, step)) for step in steps]
            lines.append(f"| {fault} | " + " | ".join(letters) + " |")
    return "\n".join(lines).strip()


def _vllm() -> str:
    """What comes of the update, of each cell on real vLLM."""
    lines = ["| scene | actor | fault | step | |", "|---" * 5 + "|"]
    for cell in VLLM_CELLS:
        step = cell.step.replace("_", " ")
        lines.append(
            f"| {cell.scene} | {cell.actor} | {cell.fault} | {step} | {outcome_of(cell)} |"
        )
    return "\n".join(lines)


def filled(page: str) -> str:
    """docs/faults.md with its tables as they stand here."""
    parts = {
        "faults": "\n".join(f"| {name} | {text} |" for name, text in FAULTS.items()),
        "outcomes": "\n".join(f"- **{letter}**: {text}." for letter, (text, _) in OUTCOMES.items()),
        "matrix": _matrix(),
        "vllm": _vllm(),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}{text}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
