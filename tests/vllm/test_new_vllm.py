"""A vLLM that nobody has seen: the one at hand under another number, with a definition changed.

The changed copy serves as a vLLM does, and is driven over the bus by what still fits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from bus._vllm.source import SourceTree
from bus.errors import UpdateFailed
from tests.support.checkpoints import Checkpoint, make_checkpoint, perturbed
from tests.support.new_vllm import installed, write
from tests.support.procs import PATIENT, run_wavebus, wavebus
from tests.vllm._vllm import MAX_POSITIONS, boot_environment, require_vllm, server_argv
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer_agent import UpdateReport

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

BOOT_S = 600.0
NUMBER = "0.99.0"
ROOT = installed()


def copy_with(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """This vLLM under :data:`NUMBER`, with texts of some modules replaced."""
    tree = SourceTree(ROOT)
    changed = {}
    for module, (old, new) in {
        "vllm._version": (f"'{tree.version}'", f"'{NUMBER}'"),
        **changes,
    }.items():
        text = tree.text(module)
        assert old in text, f"{module} has no {old}"
        changed[tree.module_path(module)] = text.replace(old, new)
    return write(ROOT, changed, folder)


class Bus:
    """A broker, and a sidecar that has started a server of the changed vLLM."""

    def __init__(
        self, stack: ExitStack, tmp_path: Path, copy: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._capsys = capsys
        self.checkpoint: Checkpoint = make_checkpoint(
            tmp_path / "model", seed=1, max_positions=MAX_POSITIONS
        )
        environment = boot_environment(tmp_path / "plugins")
        environment["PYTHONPATH"] = os.pathsep.join([str(copy), environment["PYTHONPATH"]])
        broker = stack.enter_context(wavebus("broker", "--listen", "tcp://127.0.0.1:*", *PATIENT))
        self.address = broker.first_line()
        argv = server_argv(self.checkpoint.folder)
        stack.enter_context(
            wavebus(
                *("sidecar", "--broker", self.address, "--name", "e0", "--", *argv),
                env=environment,
            )
        )
        self.joined = broker.wait_event("peer_joined", timeout_s=BOOT_S, peer="e0")

    def status(self) -> str:
        answer = run_wavebus("status", "--broker", self.address)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def updates(self, *seeds: int) -> tuple[list[UpdateReport], list[str]]:
        """Send so many sets of weights; how each arrived, and the trainer's warnings."""
        reports = []
        self._capsys.readouterr()
        with SyncTrainerAgent(self.address) as agent:
            agent.wait_for_engines(1)
            for seed in seeds:
                agent.update_weights(perturbed(self.checkpoint.weights, seed=seed))
                assert agent.last_update is not None
                reports.append(agent.last_update)
        logged = [json.loads(line) for line in self._capsys.readouterr().err.splitlines()]
        warnings = [line for line in logged if line["level"] == "warning"]
        return reports, [f"{line['event']}: {line.get('reason', '')}" for line in warnings]


Boot = Callable[[dict[str, tuple[str, str]]], Bus]


@pytest.fixture
def boot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Boot]:
    with ExitStack() as stack:
        yield lambda changes: Bus(stack, tmp_path, copy_with(tmp_path / "copy", changes), capsys)


@pytest.mark.slow
def test_a_change_in_lockstep_code_costs_a_dense_engine_nothing(boot: Boot) -> None:
    """vLLM itself goes on with its renamed method; staged updates work, without a word of it."""
    renamed = ("sync_dp_state", "sync_state_of_ranks")
    changes = {"vllm.config.parallel": renamed, "vllm.v1.engine.core": renamed}
    running = boot(changes)
    untested = f"vLLM {NUMBER} is untested: wavebus was run on"
    assert untested in running.status()
    assert running.joined["untested"].startswith(untested)
    assert "features_off" not in running.joined
    reports, warnings = running.updates(1, 2)
    assert [report.how for report in reports] == ["staged", "staged"]
    assert warnings == []
    assert " is off: " not in running.status()


@pytest.mark.slow
def test_a_vllm_that_takes_no_staged_updates_says_so_wherever_one_looks(boot: Boot) -> None:
    """It is updated in pauses. Trainer, status and log name what is different, the trainer once."""
    changes = {
        "vllm.v1.engine.core": (
            "def reset_encoder_cache(self)",
            "def reset_encoder_cache(self, gently: bool = False)",
        )
    }
    running = boot(changes)
    why = "EngineCoreProc.reset_encoder_cache takes self, gently"
    assert f"staged_updates is off: {why} (e0)" in running.status()
    assert running.joined["features_off"] == f"staged_updates: {why}"
    assert running.joined["level"] == "warning"
    reports, warnings = running.updates(1, 2)
    assert [report.how for report in reports] == ["paused", "paused"]
    assert {report.why_paused for report in reports} == {
        f"e0: this vLLM can't stage updates: {why}"
    }
    assert warnings == [f"staged_updates_off: {why}"]
    with SyncTrainerAgent(running.address) as agent:
        agent.wait_for_engines(1)
        weights = perturbed(running.checkpoint.weights, seed=3)
        with pytest.raises(UpdateFailed, match=r"can.t stage updates.*gently"):
            agent.update_weights(weights, how="staged")
