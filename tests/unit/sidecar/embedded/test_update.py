"""The update machine refuses what is out of order, and then nothing has changed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from bus._weight_transfer.checksum import checksums
from bus._weight_transfer.shm import ShmReceiver
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._embedded.update import Updater
from tests.support.checkpoints import Checkpoint, perturbed
from tests.support.push import Push, manifest_of
from tests.support.steps import steps
from tests.unit.sidecar.embedded.harness import PROMPT, greedy, run, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from torch import Tensor

    from bus.messages import Verify
    from bus.operations import ReceiveChunk
    from sidecar._embedded.engine import EmbeddedEngine


async def _refused(call: Awaitable[Any], said: str, code: NackCode = NackCode.WRONG_STATE) -> None:
    with pytest.raises(EngineError, match=said) as refused:
        await call
    assert refused.value.code is code


async def _assert_serves(
    engine: EmbeddedEngine, checkpoint: Checkpoint, weights: Mapping[str, Tensor], version: int
) -> None:
    (output,) = await engine.generate(PROMPT, greedy(12)).outputs()
    assert list(output.token_ids) == checkpoint.greedy(weights, PROMPT, 12)
    assert [span.version for span in output.weight_versions] == [version]
    assert await engine.version() == version


def test_an_update_of_a_running_engine_is_refused(checkpoint: Checkpoint) -> None:
    """Arming is not; starting is."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            push = Push(engine, perturbed(checkpoint.weights, 1))
            await _refused(push.begin(), "an update needs a paused engine")
            push.close()
            await _assert_serves(engine, checkpoint, checkpoint.weights, 0)

    run(scenario())


def test_steps_before_their_time_are_refused(checkpoint: Checkpoint) -> None:
    """Each with the step that is missing; then the update can go on."""
    new = perturbed(checkpoint.weights, 2)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            await _refused(steps(engine).start_update(recover=False), "no manifest is armed")
            await _refused(steps(engine).load(0), "load is not allowed while the update is idle")
            await _refused(
                steps(engine).finish_update(), "finish is not allowed while the update is idle"
            )
            await _refused(
                steps(engine).restore(), "restore is not allowed while the update is idle"
            )
            await _refused(engine.commit(1), "commit is not allowed while the update is idle")
            push = Push(engine, new, chunks=2)
            await push.begin()
            await _refused(steps(engine).start_update(recover=False), "no manifest is armed")
            await _refused(steps(engine).load(0), "chunk 0 is requested, but nothing was")
            await _refused(engine.resume(), "can't resume: an update is loading")
            first = push.offer(0)
            await steps(engine).receive(first)
            await _refused(steps(engine).load(1), "chunk 1 is requested, but only .0. was")
            await _refused(
                steps(engine).receive(push.offer(1)), "chunks .0. are received and not loaded"
            )
            await steps(engine).receive(first)
            await steps(engine).load(0)
            await _refused(steps(engine).load(0), "chunk 0 is requested, but nothing was")
            await _refused(steps(engine).receive(push.offer(0)), "chunk 0 is loaded already")
            await _refused(steps(engine).restore(), "send a whole update")
            await _refused(steps(engine).finish_update(), "1 of 2 chunks are not loaded")
            await _refused(engine.commit(1), "commit is not allowed while the update is loading")
            await steps(engine).receive(push.offer(1))
            await steps(engine).load(1)
            await steps(engine).finish_update()
            await _refused(
                steps(engine).finish_update(), "finish is not allowed while the update is finished"
            )
            await _refused(engine.resume(), "can't resume: an update is finished")
            await _refused(engine.commit(0), "version 0 does not follow 0")
            await engine.commit(5)
            await _refused(engine.commit(6), "commit is not allowed while the update is idle")
            push.close()
            await engine.resume()
            await _assert_serves(engine, checkpoint, new, 5)

    run(scenario())


def test_a_chunk_that_was_not_armed_is_refused(checkpoint: Checkpoint) -> None:
    """Another number, another transport."""
    new = perturbed(checkpoint.weights, 3)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            push = Push(engine, new, chunks=4)
            await push.begin()
            chunk = push.offer(0)
            wrong = replace(chunk, seq=4)
            failed = NackCode.TRANSFER_FAILED
            await _refused(steps(engine).receive(wrong), "is not in the armed manifest", failed)
            wrong = replace(chunk, backend="nccl")
            await _refused(steps(engine).receive(wrong), "transport 'nccl' is not open", failed)
            push.close()

    run(scenario())


def test_receiving_leaves_the_model_alone(checkpoint: Checkpoint) -> None:
    """What was received and not loaded is gone with a restore."""
    new = perturbed(checkpoint.weights, 4)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            push = Push(engine, new)
            await push.begin()
            await steps(engine).receive(push.offer(0))
            await steps(engine).restore()
            push.close()
            await engine.resume()
            await _assert_serves(engine, checkpoint, checkpoint.weights, 0)

    run(scenario())


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
@pytest.mark.parametrize(("chunks", "waits"), [(1, False), (1000, False), (1000, True)])
def test_what_is_short_needs_no_thread(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    verify: Verify,
    chunks: int,
    waits: bool,
) -> None:
    """Few tensors of a receiver that waits for nobody; whatever takes long leaves the loop."""
    threads: dict[str, int] = {}
    receive, verify_it = Updater.receive, Updater.verify

    def receives(self: Updater, chunk: ReceiveChunk) -> None:
        threads["receive"] = threading.get_ident()
        receive(self, chunk)

    def verifies(self: Updater, seq: int, verify: Verify, sums: tuple[int, ...]) -> None:
        threads["verify"] = threading.get_ident()
        verify_it(self, seq, verify, sums)

    monkeypatch.setattr(Updater, "receive", receives)
    monkeypatch.setattr(Updater, "verify", verifies)
    monkeypatch.setattr(ShmReceiver, "is_blocking", waits)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            new = perturbed(checkpoint.weights, 3)
            push = Push(engine, new, chunks=min(chunks, len(new)))
            await push.begin()
            chunk = push.offer(0)
            await steps(engine).receive(chunk)
            sent = [new[meta.name] for meta in push.manifest.chunk(0)]
            await steps(engine).load(0, verify, checksums(sent, verify))
            push.close()

    run(scenario())
    here = threading.get_ident()
    short = chunks == 1000 and not waits
    assert (threads["receive"] == here) == short
    assert ("verify" in threads) == (verify != "off")
    assert (threads.get("verify") == here) == (short and verify == "sample")


def test_a_refused_manifest_takes_the_place_of_an_armed_one(checkpoint: Checkpoint) -> None:
    """After a refusal nothing is armed: an older manifest does not slip in."""

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            await steps(engine).arm(manifest_of(checkpoint.weights))
            half = dict(list(checkpoint.weights.items())[:5])
            with pytest.raises(EngineError) as refused:
                await steps(engine).arm(manifest_of(half))
            assert refused.value.code is NackCode.MANIFEST_REFUSED
            await _refused(steps(engine).start_update(recover=False), "no manifest is armed")
            await engine.resume()

    run(scenario())


@pytest.mark.parametrize("loaded", [1, 3])
def test_only_recovery_frees_a_partly_loaded_engine(checkpoint: Checkpoint, loaded: int) -> None:
    """Also when everything was loaded, and only the commit is missing."""
    broken_off, new = perturbed(checkpoint.weights, 5), perturbed(checkpoint.weights, 6)

    async def scenario() -> None:
        async with serving(checkpoint) as engine:
            await engine.pause("keep", clear_cache=True)
            push = Push(engine, broken_off, chunks=3)
            await push.begin()
            for seq in range(loaded):
                await steps(engine).receive(push.offer(seq))
                await steps(engine).load(seq)
            if loaded == 3:
                await steps(engine).finish_update()
            push.close()
            assert await engine.abort_requests() == 0
            again = Push(engine, new, chunks=3)
            await _refused(again.begin(), "only a whole update with recover")
            await _refused(engine.resume(), "the weights are incomplete")
            await again.begin(recover=True)
            await _refused(steps(engine).restore(), "send a whole update")
            again.close()
            await Push(engine, new, chunks=2).whole(1, recover=True)
            await engine.resume()
            await _assert_serves(engine, checkpoint, new, 1)

    run(scenario())


def test_updates_follow_each_other_over_one_engine(checkpoint: Checkpoint) -> None:
    """Each over a transport of its own, which replaces the one before."""

    async def scenario() -> None:
        weights = checkpoint.weights
        async with serving(checkpoint) as engine:
            for version in (1, 2, 3):
                weights = perturbed(weights, version)
                await engine.pause("keep", clear_cache=True)
                await Push(engine, weights, chunks=version).whole(version)
                await engine.resume()
                await _assert_serves(engine, checkpoint, weights, version)

    run(scenario())
