"""Serves the list of a group's models and adapters.

==========================  =========================================================
``GET /v1/models``          the models and adapters of all routable engines, each once
``GET /v1/models/NAME``     the model or adapter of this name
==========================  =========================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from trainer_agent._rollouts.attempt import UnknownModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainer_agent._rollouts.client import RolloutClient

_PATH: Final = "/v1/models"


class Card(msgspec.Struct):
    """A model or adapter in a list.

    Attributes:
        id: the name, which requests give as ``model``.
        parent: the model to which an adapter belongs; None: this is a model.
    """

    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class ModelRoutes:
    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self.routes = (web.get(_PATH, self._list), web.get(f"{_PATH}/{{name:.+}}", self._one))

    async def _list(self, _: web.Request) -> web.Response:
        cards = await self._cards()
        body = msgspec.json.encode({"object": "list", "data": [raw for _, raw in cards]})
        return web.Response(body=body, content_type="application/json")

    async def _one(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        for card, raw in await self._cards():
            if card.id == name:
                return web.Response(body=bytes(raw), content_type="application/json")
        raise UnknownModel(f"model: {name!r:.200} does not exist on any engine")

    async def _cards(self) -> list[tuple[Card, msgspec.Raw]]:
        answers = await self._client.ask_each(_PATH)
        if not answers:  # waits for an engine, or raises NoEngine
            if (answer := await self._client.ask(_PATH)) is None:
                raise web.HTTPNotFound(text="no engine has this route")
            answers = {"": msgspec.json.encode(answer)}
        return merged(answers.values())


def merged(answers: Iterable[bytes]) -> list[tuple[Card, msgspec.Raw]]:
    """Merges the ``/v1/models`` lists of several engines, models before adapters.

    Args:
        answers: the engines' answers. Malformed answers are left out.

    Returns:
        Each model's card once, and its JSON. If engines differ, the first engine's card is kept.
    """
    cards: dict[str, tuple[Card, msgspec.Raw]] = {}
    for answer in answers:
        try:
            raws = msgspec.json.decode(answer, type=_List).data
            found = [(msgspec.json.decode(raw, type=Card), raw) for raw in raws]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        for card, raw in found:
            cards.setdefault(card.id, (card, raw))
    return sorted(cards.values(), key=lambda pair: pair[0].parent is not None)
