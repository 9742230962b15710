"""Runs a bench's program: ``python -m lab.bench.programs PROGRAM SETTINGS LOOP``.

PROGRAM is a module with a function of the same name, which is run. The module is beside this one
unless its name has a dot. SETTINGS are the function's arguments in JSON. LOOP is the kind of event
loop. A function that is not asynchronous runs to its end. An asynchronous one also gets an exit
stack, and returns an object. Its attribute ``hello``, a dict, is the process's first answer. Then
the bench calls the object's methods until stdin ends (:class:`lab.bench.harness.Worker`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import bus.log
from bus._runtime import event_loop
from bus._runtime.json_lines import read_commands, write_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from bus._runtime.event_loop import LoopChoice


ARGUMENTS: Final = 3


async def serve(program: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Runs an asynchronous program, and executes the calls that come on stdin.

    Each line of stdin has a method's name and its arguments, in JSON.
    """
    async with contextlib.AsyncExitStack() as stack:
        target = await program(stack, **settings)
        write_answer(**getattr(target, "hello", {}))
        async for line in read_commands():
            method, arguments = json.loads(line)
            answer = getattr(target, method)(**arguments)
            write_answer(answer=await answer if inspect.isawaitable(answer) else answer)


if __name__ == "__main__":
    if len(sys.argv) <= ARGUMENTS:
        sys.exit("usage: python -m lab.bench.programs PROGRAM SETTINGS LOOP")
    package, _, name = sys.argv[1].rpartition(".")
    bus.log.configure(json=True)
    module = importlib.import_module(f"{package or 'lab.bench.programs'}.{name}")
    chosen, given = getattr(module, name), json.loads(sys.argv[2])
    if inspect.iscoroutinefunction(chosen):
        with contextlib.suppress(KeyboardInterrupt):
            event_loop.run(serve(chosen, given), loop=cast("LoopChoice", sys.argv[3]))
    else:
        chosen(**given)
