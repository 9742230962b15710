"""The fault matrix: who fails, at which step, in which way; and what may come of it.

One of updates in a pause, and one of staged updates, which have other steps
(:mod:`tests.faults.steps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.faults.steps import COLLECTIVE_STEPS, STAGED_STEPS, STEPS

if TYPE_CHECKING:
    from trainer_agent._options import How

# What fails, as a name of :class:`tests.faults.world.World`. An embedded engine lives in its
# sidecar's process. So "sidecar" is one with an engine of its own, and "engine" is one of two that
# step in lockstep, each with a sidecar: what it leaves behind is a peer rank in a collective.
ACTORS: Final = {
    "broker": "broker",
    "sidecar": "e0",
    "engine": "m-1",
    "rank0": "trainer-0",
    "rank1": "trainer-1",
}
FAULTS: Final = {
    "sigkill": "The process gets SIGKILL and is restarted later.",
    "sigstop": "The process gets SIGSTOP, and SIGCONT after more than the lease.",
    "cut": "The link is cut: the connection drops, and new ones are refused.",
    "mute": "The link is cut one way: nothing that it sends arrives; the connection stays open.",
    "deaf": "The link is cut the other way: nothing reaches it; the connection stays open.",
}
PAGE: Final = Path(__file__).resolve().parents[2] / "docs/faults.md"


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the matrix, in which all engines are embedded; or, with a ``scene``, of those on real
    vLLM. Chunks go over ``backend``."""

    actor: str
    fault: str
    step: str
    scene: str = ""
    how: How = "paused"
    backend: str = "shm"

    def __str__(self) -> str:
        how = self.how if self.staged else ""
        backend = self.backend if self.collective else ""
        names = (how, backend, self.scene, self.actor, self.fault, self.step)
        return "-".join(filter(None, names))

    @property
    def staged(self) -> bool:
        return self.how == "staged"

    @property
    def collective(self) -> bool:
        """Whether all ends take part in the transfer of a chunk, so that each needs the others."""
        return self.backend == "gloo"

    @property
    def takes_along(self) -> bool:
        """Whether the message that is held is lost with who fails: else it arrives yet."""
        return (self.actor, self.fault, self.step) == ("broker", "sigkill", "commit_asked")

    @property
    def peer(self) -> str:
        """Who fails, or whose process; as a name of :class:`tests.faults.world.World`."""
        return (VLLM_ACTORS[self.scene] if self.scene else ACTORS)[self.actor]


CELLS: Final = tuple(
    Cell(actor, fault, step) for actor in ACTORS for fault in FAULTS for step in STEPS
)

# An engine alone has no peer rank that it could wait for, or agree with.
OF_MATES: Final = frozenset({"ready", "agreed"})
STAGED_CELLS: Final = tuple(
    Cell(actor, fault, step, how="staged")
    for actor in ACTORS
    for fault in FAULTS
    for step in STAGED_STEPS
    if step not in OF_MATES or actor == "engine"
)

# Over a communicator: the chunk at which somebody fails is announced to all but one engine, and all
# others wait for that one. Faults of links are of engines alone: ends meet at the trainer.
_OF_ENDS: Final = {
    "sidecar": ("sigkill", "sigstop", "cut", "mute"),
    "engine": ("sigkill", "sigstop", "cut", "mute"),
    "rank0": ("sigkill", "sigstop"),
}
COLLECTIVE_CELLS: Final = tuple(
    Cell(actor, fault, step, how="staged", backend="gloo")
    for actor, faults in _OF_ENDS.items()
    for fault in faults
    for step in COLLECTIVE_STEPS
)
PAUSED_COLLECTIVE_CELLS: Final = (
    Cell("engine", "sigkill", "middle_chunk", backend="gloo"),
    Cell("sidecar", "sigstop", "first_chunk", backend="gloo"),
)
COLLECTIVE_SHARE: Final = (
    Cell("sidecar", "sigkill", "middle_chunk", how="staged", backend="gloo"),
    Cell("engine", "sigstop", "first_chunk", how="staged", backend="gloo"),
)

# With every actor and every fault among them, also without those of `make slow` alone.
SHARE: Final = (
    Cell("broker", "sigkill", "join"),
    Cell("sidecar", "sigstop", "first_pause_ack"),
    Cell("engine", "sigkill", "last_chunk"),
    Cell("rank0", "deaf", "finish"),
    Cell("sidecar", "mute", "canary"),
    Cell("rank1", "cut", "commit"),
)
STAGED_SHARE: Final = (
    Cell("engine", "sigkill", "agreed", how="staged"),
    Cell("broker", "sigkill", "commit_asked", how="staged"),
    Cell("rank0", "sigkill", "last_chunk", how="staged"),
)
# Of those: a broker and an engine are killed in staged updates as well.
SLOW_SHARE: Final = frozenset(
    {Cell("broker", "sigkill", "join"), Cell("engine", "sigkill", "last_chunk")}
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
STAGED_VLLM_CELLS: Final = (
    Cell("sidecar", "sigkill", "middle_chunk", "vllm", "staged"),
    Cell("rank0", "sigkill", "last_chunk", "vllm", "staged"),
    Cell("broker", "sigkill", "commit_asked", "vllm", "staged"),
    Cell("broker", "sigkill", "commit_asked", "vllm_dp", "staged"),
    Cell("core", "sigkill", "commit_asked", "vllm_dp", "staged"),
    Cell("core", "sigkill", "agreed", "vllm_dp", "staged"),
)
# One of each scene, with no engine to boot a second time: those of `make slow`.
VLLM_SHARE: Final = (
    Cell("sidecar", "sigstop", "globally_paused", "vllm"),
    Cell("rank0", "sigkill", "middle_chunk", "vllm_dp"),
)
# This one is of every test run.
STAGED_VLLM_SHARE: Final = (Cell("rank0", "sigkill", "last_chunk", "vllm", "staged"),)


def clears_cache(cell: Cell) -> bool:
    """Whether its updates do, and requests compute keys and values anew, or go on over the old."""
    if cell in STAGED_CELLS:  # some of each actor's, each fault's and each step's
        names = ((ACTORS, cell.actor), (FAULTS, cell.fault), (STAGED_STEPS, cell.step))
        return sum([*known].index(name) for known, name in names) % 2 == 0
    others = (*COLLECTIVE_CELLS, *PAUSED_COLLECTIVE_CELLS)
    return (*CELLS, *VLLM_CELLS, *STAGED_VLLM_CELLS, *others).index(cell) % 2 == 0


# What comes of the update that a fault meets: a letter, what it means, and how the update may end
# (see :meth:`tests.faults.cell.Play.run`).
OUTCOMES: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "C": (
        "Committed on all engines.",
        frozenset({"committed"}),
    ),
    "W": (
        (
            "Committed without the failed engine and its peer rank, unless these had finished. "
            "The next update brings them back."
        ),
        frozenset({"committed"}),
    ),
    "G": (
        (
            "Fails before anything is loaded. The error names the failed engine; "
            "all others resume the old version."
        ),
        frozenset({"failed"}),
    ),
    "E": (
        (
            "The trainer, if alive, gets an error. Engines that committed serve the new version. "
            "Engines that loaded nothing resume the old one. "
            "Partly loaded engines are quarantined until the next update."
        ),
        frozenset({"failed", "gone"}),
    ),
    "N": (
        "The trainer, if alive, gets an error. No engine has committed; all serve the old version.",
        frozenset({"failed", "gone"}),
    ),
    "P": (
        (
            "The trainer, if alive, gets an error. Engines that committed serve the new version; "
            "the others are stale until the next update."
        ),
        frozenset({"failed", "gone"}),
    ),
    "X": (
        (
            "Either committed, or an error for the trainer. It depends on whether the fault "
            "comes before or after a message in flight or a deadline."
        ),
        frozenset({"committed", "failed"}),
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
    if cell.collective and cell.fault == "mute":
        return "W"  # it takes part in each broadcast, and all are made before it is missed
    if cell.collective:
        return "N" if cell.staged else "E"
    if cell.staged:
        return _staged_outcome_of(cell)
    match cell.actor:
        case "rank1":
            return "C"
        case "sidecar" | "engine" | "server" | "core":
            return "G" if cell.step in _BEFORE_THE_PAUSE_IS_MADE else "W"
        case "rank0" if cell.fault == "sigkill":
            return "E"
        case _ if cell.step == "join":
            return "X"
        case "rank0" if cell.fault != "deaf":
            return "E" if cell.step in {*_BEFORE_ALL_IS_SENT, "canary"} else "X"
        case _:
            return "E" if cell.step in _BEFORE_THE_COMMIT else "X"


def _staged_outcome_of(cell: Cell) -> str:
    match cell.actor:
        case "rank1":
            return "C"
        case "engine" | "core" if (cell.step, cell.fault) == ("armed", "sigkill"):
            return (
                "X"  # its peer rank may live to refuse the start, which gives the update up for all
            )
        case "sidecar" | "engine" | "core":
            return "W"
        case _ if cell.step in _BEFORE_ALL_IS_SENT:
            return "N"
        case "broker" if cell.step in _BEFORE_THE_COMMIT and cell.fault != "sigstop":
            return "N"
        case "rank0" if cell.fault in {"sigkill", "deaf"}:
            return "P"
        case _:
            return "X"


def concerned_by(cell: Cell) -> frozenset[str]:
    """Engines that an update may leave out, or name, because of the fault: who fails, with its peer
    in lockstep. A broker that hears nobody misses all."""
    if cell.actor == "broker":
        return frozenset({"e0", "m-0", "m-1"})
    mine = {"e0": ("e0",), "m-1": ("m-0", "m-1")}
    return frozenset(mine.get(cell.peer, ()))


# At these who fails may have done all of the update, or is back before it begins.
_MAY_BE_DONE: Final = frozenset(
    {"join", "commit", "resume", "commit_asked", "ready", "agreed", "committed"}
)


def must_fall_out(cell: Cell) -> frozenset[str]:
    """Engines without which the update is committed, if it is."""
    left_out = outcome_of(cell) == "W" and cell.step not in _MAY_BE_DONE
    return concerned_by(cell) if left_out else frozenset()


def ends_of(cell: Cell) -> frozenset[str]:
    """How its update may end (see :meth:`tests.faults.cell.Play.run`). A trainer is gone only if it
    was killed."""
    ends = OUTCOMES[outcome_of(cell)][1]
    killed = (cell.actor, cell.fault) == ("rank0", "sigkill")
    return ends if killed else ends - {"gone"}


def _matrix(cells: tuple[Cell, ...]) -> str:
    """What comes of the update, of each cell. Faults of an actor with equal outcomes share a row.

    A step that only ranks in lockstep have is empty for all other actors.
    """
    steps = list(dict.fromkeys(cell.step for cell in cells if cell.actor == "engine"))
    head = " | ".join(step.replace("_", " ") for step in steps)
    lines = [f"| actor | fault | {head} |", "|---" * (len(steps) + 2) + "|"]
    for actor in ACTORS:
        rows: dict[str, list[str]] = {}
        for fault in FAULTS:
            mine = {cell.step: cell for cell in cells if (cell.actor, cell.fault) == (actor, fault)}
            if not mine:
                continue
            row = [outcome_of(mine[step]) if step in mine else "" for step in steps]
            rows.setdefault(" | ".join(row), []).append(fault)
        for letters, faults in rows.items():
            named = "all" if len(faults) == len(FAULTS) else ", ".join(faults)
            lines.append(f"| {actor} | {named} | {letters} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """docs/faults.md with its tables as they stand here."""
    parts = {
        "faults": "\n".join(f"| {name} | {text} |" for name, text in FAULTS.items()),
        "outcomes": "\n".join(f"- **{letter}**: {text}" for letter, (text, _) in OUTCOMES.items()),
        "matrix": _matrix(CELLS),
        "staged": _matrix(STAGED_CELLS),
        "collective": _matrix(COLLECTIVE_CELLS),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}{text}\n{end}{tail}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
