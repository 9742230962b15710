"""A core frees no adapter that one of its requests uses, and takes no request for one it lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bus import operations as ops
from sidecar._vllm.plugin import operations
from sidecar._vllm.plugin.core import adapters
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS


def request(name: str, path: str = f"{ADAPTER_PATHS}u1") -> Any:
    """As much of vLLM's as is looked at; without a name it has no adapter."""
    lora = SimpleNamespace(lora_name=name, lora_path=path) if name else None
    return SimpleNamespace(lora_request=lora)


class Core:
    """Has requests, and workers that hold these adapters."""

    def __init__(self, *names: str, held: tuple[str, ...] = ()) -> None:
        requests = {str(number): request(name) for number, name in enumerate(names)}
        self.scheduler = SimpleNamespace(requests=requests)
        self.held: tuple[str, ...] | None = held
        self.carried_out: list[operations.WorkerOperation] = []

    def call(self, operation: operations.WorkerOperation) -> None:
        kwargs = {"operation": operations.encode(operation)}
        adapters.collective_rpc(Core._original, self, operations.PERFORM, None, (), kwargs)

    def _original(self, _method: str, _timeout: Any, _args: Any, kwargs: dict[str, Any]) -> Any:
        self.carried_out.append(operations.decode(kwargs["operation"]))
        return [msgspec.to_builtins(ops.Done(adapters=self.held))]


@pytest.mark.parametrize("operation", [operations.SettleAdapter(), operations.DropAdapters()])
def test_workers_are_told_which_adapters_are_in_use(
    operation: operations.SettleAdapter | operations.DropAdapters,
) -> None:
    core = Core("b", "", "a", "b")
    core.call(operation)
    assert core.carried_out == [type(operation)(in_use=("a", "b"))]


def test_all_else_reaches_workers_as_it_came() -> None:
    core = Core("a")
    large = ops.Open("o1", "lora:" + "x" * 128, b"x" * 4096)
    for each in (operations.UndoAdapter(settled=True), large):
        core.call(each)
    assert core.carried_out == [operations.UndoAdapter(settled=True), large]
    assert adapters.collective_rpc(lambda *a: a[1:], core, "sleep", 3.0, (1,)) == (
        "sleep",
        3.0,
        (1,),
        None,
    )


def test_a_request_whose_adapter_is_gone_is_not_for_the_workers() -> None:
    """Before a worker has said what there is, nobody knows. A user's own is vLLM's matter."""
    core = Core(held=("a",))
    assert adapters.missing(core, request("b")) == ""
    core.call(operations.SettleAdapter())
    core.held = None
    core.call(ops.Finish())  # which says nothing of adapters
    assert adapters.missing(core, request("a")) == ""
    assert adapters.missing(core, request("")) == ""
    assert adapters.missing(core, request("b", "/models/b")) == ""
    assert "b was removed" in adapters.missing(core, request("b"))
