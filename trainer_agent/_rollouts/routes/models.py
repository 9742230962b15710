"""Serves the list of a group's models: all that its engines have.

==========================  =========================================================
``GET /v1/models``          the models and adapters of all routable engines, each once
``GET /v1/models/NAME``     one of them
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
    """What a list says of a model.

    Attributes:
        id: its name, which requests give as ``model``.
        parent: the model that an adapter belongs to; None: it is no adapter.
    """

    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class ModelRoutes:
    """The handlers of these routes.

    Args:
        client: asks engines.

    Attributes:
        routes: the routes.
    """

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
        raise UnknownModel(f"model: {name!r:.200} does not exist")

    async def _cards(self) -> list[tuple[Card, msgspec.Raw]]:
        answers = await self._client.ask_each(_PATH)
        if not answers:  # waits for an engine, or says why there is none
            if (answer := await self._client.ask(_PATH)) is None:
                raise web.HTTPNotFound(text="no engine has this route")
            answers = {"": msgspec.json.encode(answer)}
        return merged(answers.values())


def merged(answers: Iterable[bytes]) -> list[tuple[Card, msgspec.Raw]]:
    """Returns each card of the engines' lists once, models before adapters.

    Args:
        answers: the engines' answers. Those that can't be read are left out.

    Returns:
        Of each card what is known here, and its JSON. If engines differ, that of the first counts.
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
