"""Forks vLLM's processes instead of spawning them, by a plugin of the tests.

On CPUs vLLM starts each core and each worker as a new interpreter, which imports vLLM once more:
six seconds each. On GPUs it forks them, as long as CUDA is not in use. With this plugin it forks
them on CPUs too. The cores of a test's own process come from a fork server that has imported vLLM
and has neither threads nor sockets (:class:`ForkServer`); all others from who starts them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# "fork", "server" in a process that has :data:`SERVER`, or "spawn".
START: Final = "WAVEBUS_TESTS_START"
# What cores and workers import: they are forked with it. Plugins see it, too.
IMPORTED: Final = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*IMPORTED])


def register() -> None:
    """vLLM calls this in every process."""
    if os.environ.get(START, "spawn") == "spawn":
        return
    from vllm.utils import system_utils  # noqa: PLC0415 - only inside vLLM

    if os.environ[START] == "fork":
        for name in IMPORTED:
            importlib.import_module(name)
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = _run  # which would import vLLM to look at a model's class
    spawn = system_utils.get_mp_context
    for module in list(sys.modules.values()):
        if vars(module).get("get_mp_context") is spawn:
            vars(module)["get_mp_context"] = _start_context


def _run(look: Callable[[], Any]) -> Any:
    return look()


def _start_context() -> Any:
    how = os.environ.get(START, "spawn")
    return _Server() if how == "server" else multiprocessing.get_context(how)


def begin(
    environment: Mapping[str, str], path: list[str], target: Callable[..., None], arguments: Any
) -> None:
    """In a process of the fork server: be as if started from where the test is."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ[START] = "fork"
    sys.path[:] = path
    target(**arguments)


class _Server:
    """A context of multiprocessing, as vLLM uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_context, name)

    @staticmethod
    def Process(  # noqa: N802 - multiprocessing calls it so
        target: Callable[..., None], name: str | None = None, kwargs: Any = None, **options: Any
    ) -> Any:
        arguments = dict(os.environ), list(sys.path), target, kwargs or {}
        return _context.Process(target=begin, name=name, args=arguments, **options)
