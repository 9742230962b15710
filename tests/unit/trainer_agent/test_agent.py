"""The arguments of a trainer agent, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
import torch

from bus.errors import UsageError
from tests.unit.trainer_agent.test_connection import StubBroker
from trainer_agent._agent import TrainerAgent
from trainer_agent._rollouts.sync_client import SyncRolloutClient
from trainer_agent._sync_agent import SyncTrainerAgent

LORA = {f"base_model.model.q.lora_{which}.weight": torch.zeros(1, 1) for which in "AB"}
CONFIG = {"r": 1, "lora_alpha": 1, "target_modules": ["q"]}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"mode": "kep"}, "mode='kep': choose one of abort, wait, keep"),
        ({"escalate": "end"}, "escalate='end': choose one of keep, abort"),
        ({"how": "stage"}, "how='stage': choose one of auto, staged, paused"),
        ({"dtype": "bf16"}, "dtype='bf16': choose one of source, engine"),
        ({"target": "drft"}, "target='drft': choose one of model, draft"),
        ({"label": 3}, "label=3: a text"),
    ],
)
def test_a_wrong_argument_of_an_update_is_named_with_its_choices(
    wrong: dict[str, Any], text: str
) -> None:
    """Before anything is asked: here there is no broker."""

    async def scenario() -> None:
        agent = TrainerAgent("tcp://127.0.0.1:1", transport=StubBroker())
        with pytest.raises(UsageError, match=text):
            await agent.update_weights({"w": torch.zeros(1)}, **wrong)
        if "label" in wrong:
            with pytest.raises(UsageError, match=text):
                await agent.update_adapter("a", LORA, config=CONFIG, **wrong)
        if "mode" in wrong:
            with pytest.raises(UsageError, match=text):
                async with agent.paused(**wrong):
                    pass
            with pytest.raises(UsageError, match="level=3: choose one of 1, 2"):
                async with agent.asleep(level=3):  # type: ignore[arg-type]
                    pass

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


@pytest.mark.parametrize("made", [SyncTrainerAgent, SyncRolloutClient])
def test_an_unknown_argument_is_refused_at_once(made: Any) -> None:
    """Not when it connects."""
    with pytest.raises(TypeError, match="groups"):
        made("tcp://127.0.0.1:1", groups="policy")


def test_who_is_cancelled_while_he_leaves_has_left() -> None:
    """A cancelled scope cancels each wait in it; else the broker would hear the agent for ever."""

    async def scenario() -> None:
        broker = StubBroker()
        agent = TrainerAgent("tcp://127.0.0.1:1", keep_last=True, transport=broker)
        let_go = asyncio.Event()
        with anyio.CancelScope() as scope:
            async with agent:
                assert agent._catch_up is not None
                agent._catch_up._task = asyncio.create_task(undone(let_go))
                await asyncio.sleep(0)
                scope.cancel()
        assert scope.cancelled_caught
        assert broker.kinds[-1] == "LEAVE"
        let_go.set()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


async def undone(let_go: asyncio.Event) -> None:
    """A catch-up that takes a while to undo."""
    try:
        await asyncio.Future()
    finally:
        await let_go.wait()
