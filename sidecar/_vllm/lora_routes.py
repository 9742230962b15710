"""Calls a server's routes for LoRA adapters, and makes the ids of adapters for vLLM."""

from __future__ import annotations

import json
import secrets
import zlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from bus._keys import API_KEY_VARIABLE
from bus.errors import EngineError
from bus.messages import NackCode
from sidecar._vllm.plugin.operations import engine_error
from sidecar._vllm.plugin.vllm_names import ADAPTER_PATHS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
MODELS: Final = "/v1/models"
SWITCH: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_LARGEST_ID: Final = 2**31 - 1


def adapter_id(name: str) -> int:
    """Returns the id that vLLM uses for the LoRA adapter of this name."""
    return 1 + zlib.crc32(name.encode()) % _LARGEST_ID


class AdapterRoutes:
    """Makes one API server load LoRA adapters, one at a time, through its routes.

    Args:
        status_of: sends a request to the server, as ``VllmHttpClient.status_of`` does.
        url: the server's URL, for errors.
    """

    def __init__(self, status_of: Callable[..., Awaitable[tuple[int, str]]], url: str) -> None:
        self._status_of = status_of
        self._url = url
        self._known = self._removed = False

    async def check(self, name: str) -> None:
        """Checks that the server can load a LoRA adapter, and records whether it has the name.

        Args:
            name: the adapter's name.

        Raises:
            EngineError: code ``backend_missing``: the server has no such routes, or they need its
                API key; code ``malformed``: the server's own model has that name.
        """
        # vLLM refuses a request without a name; if it lacks the route, it answers 404 instead.
        status, text = await self._status_of("POST", LOAD, {"lora_name": "", "lora_path": ""})
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED):
            why = (
                f"start it with {SWITCH}=1"
                if status == HTTPStatus.NOT_FOUND
                else f"it needs the server's API key: give the sidecar the same {API_KEY_VARIABLE}"
            )
            raise EngineError(
                f"{self._url}{LOAD} answers {status}: {why}", code=NackCode.BACKEND_MISSING
            )
        status, text = await self._status_of("GET", MODELS)
        if status != HTTPStatus.OK:
            raise EngineError(f"{self._url}{MODELS} answers {status}: {text[:2000]}")
        cards = {card["id"]: card.get("parent") for card in json.loads(text)["data"]}
        if name in cards and cards[name] is None:
            raise EngineError(
                f"{name!r} is the name of the model that the server serves: give the adapter "
                "another name",
                code=NackCode.MALFORMED,
            )
        self._known, self._removed = name in cards, False

    async def load(self, name: str, path: str) -> None:
        """Makes the server load an adapter again, for requests whose model is ``name``."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._post(LOAD, body)

    async def undo(self, name: str) -> None:
        """Undoes :meth:`load` or :meth:`remove`, so that the server has its earlier adapter."""
        if self._removed:
            self._removed = False
            await self.load(name, f"{ADAPTER_PATHS}restored-{secrets.token_hex(8)}")
        elif not self._known:
            await self._post(UNLOAD, {"lora_name": name}, but=HTTPStatus.NOT_FOUND)

    async def remove(self, name: str) -> None:
        """Unloads an adapter, so that the server answers 404 to requests for its name."""
        status = await self._post(UNLOAD, {"lora_name": name}, but=HTTPStatus.NOT_FOUND)
        self._removed |= status == HTTPStatus.OK

    async def _post(self, path: str, body: dict[str, Any], *, but: int = HTTPStatus.OK) -> int:
        status, text = await self._status_of("POST", path, body)
        if status not in (HTTPStatus.OK, but):
            raise engine_error(f"{self._url}{path} answers {status}: {text[:2000]}")
        return status
