"""Which adapter a worker gives to vLLM: the bus's, the one before it, or somebody's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS
from sidecar._vllm.plugin.worker.lora import HeldAdapter, LoraAdapters

OURS = f"{ADAPTER_PATHS}u2-a"
THEIRS = "/models/adapter"


class Request(msgspec.Struct, frozen=True):
    """As much of vLLM's ``LoRARequest`` as is looked at."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Manager:
    """vLLM's, as far as it forgets adapters."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    def remove_adapter(self, adapter_id: int) -> bool:
        self.removed.append(adapter_id)
        return True


class Plain(LoraAdapters):
    """Builds nothing of vLLM's."""

    def _built(self, held: HeldAdapter, adapter_id: int) -> Any:
        if held.config.get("broken"):
            raise EngineError("broken")
        return (held.config["r"], adapter_id)


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def adapters(manager: Manager) -> Plain:
    return Plain(manager)


def load(adapters: Plain, rank: int, name: str = "mine", **config: Any) -> None:
    adapters.load(name, {"r": rank, **config}, {"a": torch.zeros(1)})


def given(adapters: Plain, path: str = OURS, adapter_id: int = 7, *, step: bool = True) -> Any:
    """What vLLM gets: the bus's adapter, or the path that it is to read."""
    request = Request("mine", adapter_id, path)
    if step:
        with adapters.stepping():
            built, obeyed = adapters.replacement_for(request)
    else:
        built, obeyed = adapters.replacement_for(request)
    return obeyed.lora_path if built is None else built


def test_whatever_path_a_request_has_it_gets_what_came_last(
    adapters: Plain, manager: Manager
) -> None:
    """Under each id that it was loaded under, it is loaded again."""
    load(adapters, 1)
    assert given(adapters) == (1, 7)
    assert given(adapters, f"{ADAPTER_PATHS}u1-a", 8) == (1, 8)
    adapters.settle()
    load(adapters, 2)
    assert sorted(manager.removed) == [7, 8]
    assert given(adapters, THEIRS) == (2, 7)


def test_undone_it_is_the_one_before(adapters: Plain, manager: Manager) -> None:
    load(adapters, 1)
    adapters.settle()
    adapters.begin()
    load(adapters, 2)
    assert given(adapters) == (2, 7)
    adapters.undo(settled=False)
    assert manager.removed == [7]
    assert given(adapters) == (1, 7)


def test_a_commit_that_fails_is_undone_and_a_new_sidecar_undoes_none(adapters: Plain) -> None:
    load(adapters, 1)
    adapters.settle()
    adapters.begin()
    load(adapters, 2)
    adapters.settle()
    adapters.undo(settled=False)
    assert given(adapters) == (2, 7)
    adapters.undo(settled=True)
    assert given(adapters) == (1, 7)


def test_an_update_that_loads_nothing_undoes_nothing(adapters: Plain) -> None:
    """Given up after it was armed, it leaves what the one before has committed."""
    load(adapters, 1)
    adapters.settle()
    adapters.begin()
    adapters.undo(settled=True)
    assert given(adapters) == (1, 7)


def test_what_a_dead_sidecar_left_goes_when_the_next_is_armed(adapters: Plain) -> None:
    load(adapters, 1)
    adapters.settle()
    adapters.begin()
    load(adapters, 2)
    adapters.begin()
    assert given(adapters) == (1, 7)


def test_one_that_cannot_be_built_changes_nothing(adapters: Plain, manager: Manager) -> None:
    load(adapters, 1)
    adapters.settle()
    assert given(adapters) == (1, 7)
    with pytest.raises(EngineError, match="broken"):
        load(adapters, 2, broken=True)
    adapters.undo(settled=False)
    assert manager.removed == []
    assert given(adapters) == (1, 7)


def test_the_first_of_its_name_undone_is_gone(adapters: Plain) -> None:
    """Where a server was started with one, that is read again from where it was."""
    load(adapters, 1)
    adapters.undo(settled=True)
    assert given(adapters) == OURS
    assert given(adapters, THEIRS) == THEIRS
    load(adapters, 2)
    assert given(adapters) == (2, 7)
    adapters.undo(settled=True)
    assert given(adapters) == THEIRS


def test_who_loads_one_himself_is_obeyed(adapters: Plain) -> None:
    """By a call, not by a request that has its path."""
    load(adapters, 1)
    adapters.settle()
    assert given(adapters, THEIRS) == (1, 7)
    assert given(adapters, THEIRS, step=False) == THEIRS
    assert given(adapters, THEIRS) == THEIRS
    load(adapters, 2)
    assert given(adapters, OURS, step=False) == (2, 7)


def test_adapters_have_nothing_to_do_with_each_other(adapters: Plain, manager: Manager) -> None:
    load(adapters, 1)
    assert given(adapters) == (1, 7)
    adapters.settle()
    load(adapters, 2, "another")
    adapters.undo(settled=True)
    assert manager.removed == []
    assert given(adapters) == (1, 7)


def test_a_removed_one_serves_those_who_have_it_until_nobody_has(
    adapters: Plain, manager: Manager
) -> None:
    """vLLM drops it, and may load it again for them; it is freed at a commit, not before."""
    load(adapters, 1)
    adapters.settle()
    assert given(adapters) == (1, 7)
    adapters.remove("mine")
    assert manager.removed == [7]
    assert given(adapters) == (1, 7)
    adapters.settle()  # by a core that does not say what is in use
    assert adapters.names == ("mine",)
    adapters.settle({"mine", "another"})
    assert given(adapters) == (1, 7)
    adapters.settle(())
    assert adapters.names == ()
    assert given(adapters) == OURS


def test_a_removal_is_undone(adapters: Plain) -> None:
    """Also one that was settled, and one of an adapter that was not there."""
    load(adapters, 1)
    adapters.settle(())
    for settled in (False, True):
        adapters.remove("mine")
        if settled:
            adapters.settle(())
            assert adapters.names == ()
        adapters.undo(settled=settled)
        assert adapters.names == ("mine",)
        assert given(adapters) == (1, 7)
        adapters.settle(())
        assert adapters.names == ("mine",)
    adapters.remove("another")
    adapters.undo(settled=True)
    assert adapters.names == ("mine",)


def test_the_next_of_a_removed_name_replaces_it_for_all(adapters: Plain) -> None:
    load(adapters, 1)
    adapters.settle(())
    adapters.remove("mine")
    adapters.settle({"mine"})
    load(adapters, 2)
    assert given(adapters) == (2, 7)
    adapters.undo(settled=False)
    assert given(adapters) == (1, 7)
    load(adapters, 2)
    adapters.settle({"mine"})
    adapters.remove("mine")
    adapters.settle(())
    assert adapters.names == ()


def test_an_engine_that_was_away_drops_all_for_good(adapters: Plain) -> None:
    """But what its requests use, and what an update under way has loaded."""
    for rank, name in enumerate(("mine", "another"), 1):
        load(adapters, rank, name)
        adapters.settle(())
    load(adapters, 3)
    adapters.drop_all({"mine"})
    assert adapters.names == ("mine",)
    assert given(adapters) == (1, 7)
    adapters.undo(settled=True)
    adapters.drop_all(())
    assert adapters.names == ()


@pytest.mark.parametrize(
    ("adapters", "text"),
    [(LoraAdapters(None), "--enable-lora"), (LoraAdapters(Manager(), "not now"), "not now")],
)
def test_a_worker_that_takes_none_says_why(adapters: LoraAdapters, text: str) -> None:
    with pytest.raises(EngineError, match=text) as refused:
        adapters.require_available()
    assert refused.value.code is NackCode.BACKEND_MISSING
