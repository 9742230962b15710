"""Methods of vLLM's ``collective_rpc`` that an engine core answers by itself."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(cores: Any, name: str, handler: Callable[..., Any]) -> None:
    """Have all cores of a class answer the method ``name`` with what the handler makes of the core
    and of the call's keyword arguments: what stands for the workers' answers, or a future of it."""
    original = cores.collective_rpc

    @functools.wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method != name:
            return original(self, method, timeout, args, kwargs)
        return handler(self, **(kwargs or {}))

    cores.collective_rpc = collective_rpc
