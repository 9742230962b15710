"""What is asked of a server that is to load adapters, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.lora_routes import LOAD, MODELS, UNLOAD, AdapterRoutes, adapter_id
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATH = "/nowhere/u7"
NO_NAME = (400, "{\"error\": \"Both 'lora_name' and 'lora_path' must be provided.\"}")


class Routes:
    """A server's answers by path, and what it was told."""

    def __init__(self, served: dict[str, str | None], **answers: tuple[int, str]) -> None:
        cards = [{"id": name, "parent": parent} for name, parent in served.items()]
        self.answers = {
            LOAD: NO_NAME,
            UNLOAD: (200, "Success"),
            MODELS: (200, json.dumps({"data": cards})),
            **{f"/v1/{name}": answer for name, answer in answers.items()},
        }
        self.told: list[tuple[str, Any]] = []

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, str]:  # noqa: ARG002
        self.told.append((path, body))
        if path == LOAD and body["lora_name"] and self.answers[LOAD] == NO_NAME:
            return 200, "Success: LoRA adapter added"
        return self.answers[path]


STEPS: dict[str, Callable[[AdapterRoutes], Awaitable[None]]] = {
    "load": lambda adapters: adapters.load("mine", PATH),
    "remove": lambda adapters: adapters.remove("mine"),
    "undo": lambda adapters: adapters.undo("mine"),
}


def run(routes: Routes, *steps: str) -> None:
    async def scenario() -> None:
        adapters = AdapterRoutes(routes, "http://here")
        await adapters.check("mine")
        for step in steps:
            await STEPS[step](adapters)

    asyncio.run(scenario())


def test_it_is_loaded_in_place_by_its_path() -> None:
    routes = Routes({"tiny": None})
    run(routes, "load")
    body = {"lora_name": "mine", "lora_path": PATH, "load_inplace": True}
    assert routes.told[-1] == (LOAD, body)


@pytest.mark.parametrize(("models", "told"), [({}, True), ({"mine": "tiny"}, False)])
def test_only_a_name_that_was_not_there_is_forgotten(models: Any, told: bool) -> None:
    """One that was, still has an adapter: the one before."""
    routes = Routes({"tiny": None, **models})
    run(routes, "undo")
    assert ((UNLOAD, {"lora_name": "mine"}) in routes.told) == told


def test_a_name_that_never_came_is_forgotten_already() -> None:
    run(Routes({"tiny": None}, unload_lora_adapter=(404, "cannot be found")), "undo")


@pytest.mark.parametrize(
    ("unload", "loads"), [((200, "Success"), 1), ((404, "cannot be found"), 0)]
)
def test_a_removal_is_undone_by_a_load_of_what_was_there(
    unload: tuple[int, str], loads: int
) -> None:
    """From a path of its own, whose keys and values nobody else has."""
    routes = Routes({"tiny": None, "mine": "tiny"}, unload_lora_adapter=unload)
    run(routes, "remove", "undo", "undo")
    loaded = [body for path, body in routes.told if path == LOAD and body["lora_name"]]
    assert len(loaded) == loads
    assert all(body["lora_path"].startswith(ADAPTER_PATHS) for body in loaded)
    assert [path for path, _ in routes.told].count(UNLOAD) == 1


@pytest.mark.parametrize(
    ("routes", "code", "text"),
    [
        (
            Routes({"tiny": None}, load_lora_adapter=(404, "Not Found")),
            NackCode.BACKEND_MISSING,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        ),
        (
            Routes({"tiny": None}, load_lora_adapter=(401, "Unauthorized")),
            NackCode.BACKEND_MISSING,
            "API key",
        ),
        (Routes({"mine": None}), NackCode.MALFORMED, "name of the model"),
        (Routes({}, models=(500, "broken")), NackCode.ENGINE_FAILED, "answers 500: broken"),
    ],
)
def test_a_server_that_would_not_load_it(routes: Routes, code: NackCode, text: str) -> None:
    """It says so before anything has changed."""
    with pytest.raises(EngineError, match=text) as refused:
        run(routes)
    assert refused.value.code is code


@pytest.mark.parametrize("step", ["load", "undo", "remove"])
def test_what_the_server_fails_with_is_told(step: str) -> None:
    routes = Routes({"tiny": None})

    async def scenario() -> None:
        adapters = AdapterRoutes(routes, "http://here")
        await adapters.check("mine")
        routes.answers |= {LOAD: (500, "no room"), UNLOAD: (500, "no room")}
        await STEPS[step](adapters)

    with pytest.raises(EngineError, match="no room"):
        asyncio.run(scenario())


def test_ids_are_stable_and_vllms() -> None:
    """The same in every process, and never 0."""
    assert adapter_id("policy-lora") == adapter_id("policy-lora") != adapter_id("policy-lorb")
    assert all(0 < adapter_id(str(n)) < 2**31 for n in range(1000))
