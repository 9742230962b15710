"""Runs a program of a bench: ``python -m sidecar.bench.programs PROGRAM SETTINGS LOOP``.

PROGRAM is a module, beside this one unless it has a dot, whose function of that name is run.
SETTINGS are the function's arguments in JSON. An asynchronous function also gets an exit stack,
and returns an object whose methods the bench calls until stdin ends
(:class:`sidecar.bench.harness.Worker`). The object's ``hello``, a dictionary, is the first answer.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from typing import TYPE_CHECKING, Any, cast

import bus.log
from bus.runtime import event_loop
from bus.runtime.json_lines import read_commands, write_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus.runtime.event_loop import LoopChoice


async def serve(program: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Executes the call in each line of stdin: a method's name and its arguments."""
    async with contextlib.AsyncExitStack() as stack:
        target = await program(stack, **settings)
        write_answer(**getattr(target, "hello", {}))
        async for line in read_commands():
            method, arguments = json.loads(line)
            answer = getattr(target, method)(**arguments)
            write_answer(answer=await answer if inspect.isawaitable(answer) else answer)


if __name__ == "__main__":
    package, _, name = sys.argv[1].rpartition(".")
    bus.log.configure(json=True)
    module = importlib.import_module(f"{package or 'sidecar.bench.programs'}.{name}")
    chosen, given = getattr(module, name), json.loads(sys.argv[2])
    if inspect.iscoroutinefunction(chosen):
        with contextlib.suppress(KeyboardInterrupt):
            event_loop.run(serve(chosen, given), loop=cast("LoopChoice", sys.argv[3]))
    else:
        chosen(**given)
