"""vLLM's routes for RL training, served for a group. docs/gateway.md lists them.

Errors: 400 for a wrong call, 404 for an adapter that does not exist, 409 for a call that conflicts
with an update under way or a failed one, 501 for a route that a group lacks, 504 if the bus or an
engine did not answer in time. Never 500, 502 or 503: some clients repeat a call after these, and
then hide the error's text.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from bus.errors import BusClosed, BusTimeout, ManifestRefused, UsageError, WavebusError
from bus.messages import PauseMode
from trainer_agent._gateway.checksums import WeightChecksums
from trainer_agent._gateway.http_update import Caller, Conflict, Missing
from trainer_agent._options import check_choice
from trainer_agent._rollouts.front_answer import error_answer
from trainer_agent._rollouts.front_request import is_text
from trainer_agent._rollouts.routes.models import merged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bus.messages import Target
    from trainer_agent._gateway.group import ClientGroup
    from trainer_agent._gateway.updates import ClientUpdates
    from trainer_agent._rollouts.client import RolloutClient

    Answer = dict[str, Any] | str
    Call = Callable[[web.Request], Awaitable[Answer]]

# vLLM's routes that a group lacks, and what clients use instead.
_NOT_OFFERED: Final = {
    "/release_kv_cache_memory": "a group can't free the KV cache alone; use /sleep?level=1",
    "/fetch_weights": "only SkyRL's weight_sync_backend=delta calls this route, which a group "
    "lacks; set generator.inference_engine.weight_sync_backend=nccl",
}
_IN_MEMORY: Final = (
    "the gateway loads no adapters from engines' memory: set "
    "trainer.policy.model.lora.sync_mode=disk, and a lora_sync_path that the gateway's host sees"
)
_MOST_CHARS: Final = 4096  # the longest path of Linux
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


class NotOffered(WavebusError):
    """Raised for a route that a group lacks. The text says what to use instead."""


_STATUSES: Final = (
    (NotOffered, 501),
    (Conflict, 409),
    (Missing, 404),
    ((UsageError, ManifestRefused), 400),
    ((BusTimeout, BusClosed), 504),
    (WavebusError, 409),
)


class ControlRoutes:
    """The handlers of the routes for training.

    Args:
        group: pauses the group, and sends what is in files.
        updates: carries out updates whose tensors the client sends.
        rollouts: has the gateway's requests, and asks engines.
    """

    def __init__(self, group: ClientGroup, updates: ClientUpdates, rollouts: RolloutClient) -> None:
        self._updates = updates
        self._group = group
        self._rollouts = rollouts

    def routes(self) -> list[web.RouteDef]:
        posts: dict[str, Call] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/reset_mm_cache": self._reset_caches,
            "/reset_encoder_cache": self._reset_caches,
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shut_down,
            "/start_weight_update": partial(self._start, "model", "Weight update started"),
            "/start_draft_weight_update": partial(
                self._start, "draft", "Draft weight update started"
            ),
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/update_weight_version": self._name,
            "/v1/load_lora_adapter": self._load_adapter,
            "/skyrl/v1/load_lora_adapter": self._load_adapter_named,
            "/load_lora_adapter": self._load_adapter_named,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/abort_requests": self._abort,
            "/weight_checker": self._check_weights,
            "/collective_rpc": self._call_all,
            **dict.fromkeys(_NOT_OFFERED, self._refuse),
        }
        gets: dict[str, Call] = {
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/get_world_size": self._world_size,
            "/weight_info": self._weight_info,
        }
        return [
            *(web.post(path, _answering(call)) for path, call in posts.items()),
            *(web.get(path, _answering(call)) for path, call in gets.items()),
        ]

    # -- pauses -----------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> Answer:
        clear_cache = _flag(http, "clear_cache", default=True)
        await self._group.pause(_mode(http), clear_cache=clear_cache)
        return {"status": "paused"}

    async def _resume(self, _: web.Request) -> Answer:
        await self._group.resume()
        return {"status": "resumed"}

    async def _is_paused(self, _: web.Request) -> Answer:
        return {"is_paused": self._group.is_paused}

    async def _sleep(self, http: web.Request) -> Answer:
        mode, text = _mode(http), http.query.get("level", "1")
        if text not in ("0", "1", "2"):
            raise UsageError(f"level={text!r}: must be 0, 1 or 2")
        await self._group.sleep(int(text), mode)
        return {"status": "sleeping", "level": int(text)}

    async def _wake_up(self, http: web.Request) -> Answer:
        tags = tuple(http.query.getall("tags", []))
        await self._group.wake(tags)
        status = "sleeping" if self._group.is_asleep else "awake"
        return {"status": status, "tags": list(tags) or None}

    async def _is_sleeping(self, _: web.Request) -> Answer:
        return {"is_sleeping": self._group.is_asleep}

    async def _reset_prefix_cache(self, _: web.Request) -> Answer:
        await self._group.reset_prefix_cache()
        return {"success": True}

    async def _reset_caches(self, _: web.Request) -> Answer:
        await self._group.reset_prefix_cache()
        return ""

    # -- updates ------------------------------------------------------------------------

    async def _world_size(self, http: web.Request) -> Answer:
        include_dp = _flag(http, "include_dp", default=True)
        return {"world_size": await self._rollouts.count_workers(include_dp=include_dp)}

    async def _init(self, http: web.Request) -> Answer:
        await self._updates.open(_part(await _body(http), "init_info"), _caller(http))
        return {"message": "Weight transfer initialized"}

    async def _shut_down(self, _: web.Request) -> Answer:
        await self._updates.close_transport()
        return {"message": "Weight transfer shut down"}

    async def _start(self, target: Target, text: str, http: web.Request) -> Answer:
        await self._updates.start(target, _caller(http))
        return {"message": text}

    async def _update(self, http: web.Request) -> Answer:
        body = await _body(http)
        if "weight_dir" in body:
            if extra := body.keys() - {"weight_dir", "weight_version"}:
                raise UsageError(f"{sorted(extra)}: can't be combined with weight_dir")
            folder = _text(body, "weight_dir")
            label = _label(body) or folder
            await self._group.send_folder(folder, label=label, caller=_caller(http))
        else:
            if body.get("update_info") is None:
                raise UsageError("update_info: is missing")
            await self._updates.receive(body["update_info"])
        return {"message": "Weights updated"}

    async def _finish(self, http: web.Request) -> Answer:
        body = await _body(http)
        await self._updates.finish(_label(body))
        return {"message": "Weight update finished"}

    async def _weight_info(self, _: web.Request) -> Answer:
        return {"weight_version": self._updates.label or "default"}

    async def _name(self, http: web.Request) -> Answer:
        self._updates.label = _text(await _body(http), "new_version")
        return {"success": True, "new_version": self._updates.label}

    async def _load_adapter(self, http: web.Request) -> Answer:
        name, _ = await self._send_adapter(http)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _load_adapter_named(self, http: web.Request) -> Answer:
        name, version = await self._send_adapter(http)
        return {"status": "ok", "lora_name": name, "lora_int_id": version}

    async def _send_adapter(self, http: web.Request) -> tuple[str, int]:
        body = await _body(http)
        if body.get("in_memory"):
            raise NotOffered(_IN_MEMORY)
        name, folder = _text(body, "lora_name"), _text(body, "lora_path")
        return name, await self._group.send_adapter(name, folder)

    async def _unload_adapter(self, http: web.Request) -> Answer:
        name = _text(await _body(http), "lora_name")
        answers = await self._rollouts.ask_each("/v1/models")
        if not any(card.id == name and card.parent for card, _ in merged(answers.values())):
            raise Missing(f"The lora adapter '{name}' cannot be found.")
        await self._group.remove_adapter(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    # -- requests ------------------------------------------------------------------------

    async def _abort(self, http: web.Request) -> Answer:
        ids = list(_texts(await _body(http), "request_ids")) or None
        return {"status": "aborted", "aborted": self._rollouts.abort_requests(ids)}

    async def _check_weights(self, http: web.Request) -> Answer:
        body = await _body(http)
        action = body.get("action")
        if action == "reset":
            raise NotOffered(f"{http.path}: reset, which sets weights to zero, is not offered")
        if action not in ("checksum", "compare"):
            raise UsageError(f"action={action!r}: must be checksum or compare")
        baseline = _part(body, "baseline") if action == "compare" else {}
        sums = await WeightChecksums.read(self._rollouts)
        if action == "checksum":
            return {"checksums": sums.merged()}
        mismatches = sums.mismatches(baseline)
        return {"match": not mismatches, "mismatches": mismatches}

    # -- what is not offered --------------------------------------------------------------

    async def _refuse(self, http: web.Request) -> Answer:
        raise NotOffered(f"{http.path}: {_NOT_OFFERED[http.path]}")

    async def _call_all(self, http: web.Request) -> Answer:
        body = await _body(http)
        method, kwargs = body.get("method"), _part({"kwargs": body.get("kwargs") or {}}, "kwargs")
        if method == "skyrl_sleep_for_weight_sync":
            await self._group.sleep(1, "keep")
        elif method == "skyrl_wake_for_weight_sync":
            await self._group.wake(_texts(kwargs, "tags"))
        elif method == "skyrl_set_lora_receive_target":
            raise NotOffered(_IN_MEMORY)
        else:
            raise NotOffered(
                f"method {method!r}: a group runs no code of its clients; use the routes that "
                "pause, sleep and update"
            )
        return {"results": [None]}


def _answering(call: Call) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(http: web.Request) -> web.Response:
        try:
            answer = await call(http)
        except WavebusError as error:
            status = next(s for kind, s in _STATUSES if isinstance(error, kind))
            text = "; ".join([str(error), *getattr(error, "__notes__", ())])
            return error_answer(http, status, text)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)

    return handle


def _caller(http: web.Request) -> Caller:
    transport = http.transport
    peer = transport.get_extra_info("peername") if transport is not None else None
    address = f"{peer[0]}:{peer[1]}" if peer else "a client"
    return Caller(address, lambda: transport is None or transport.is_closing(), transport)


def _mode(http: web.Request) -> PauseMode:
    mode: Any = http.query.get("mode", "abort")
    check_choice("mode", mode, PauseMode)
    return mode  # type: ignore[no-any-return]


def _flag(http: web.Request, name: str, *, default: bool) -> bool:
    text = http.query.get(name, str(default)).lower()
    if text not in (*_TRUE, *_FALSE):
        raise UsageError(f"{name}={text!r}: must be true or false")
    return text in _TRUE


async def _body(http: web.Request) -> dict[str, Any]:
    raw = await http.read()
    if not raw.strip():
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"body: is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("body: must be a JSON object")
    return body


def _part(body: dict[str, Any], name: str) -> dict[str, Any]:
    part = body.get(name)
    if not isinstance(part, dict):
        raise UsageError(f"{name}: must be a JSON object")
    return part


def _label(body: dict[str, Any]) -> str:
    return "" if body.get("weight_version") is None else _text(body, "weight_version")


def _text(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str) or not text:
        raise UsageError(f"{name}: must be a string, and not empty")
    if len(text) > _MOST_CHARS:
        raise UsageError(f"{name}: has {len(text)} characters; at most {_MOST_CHARS} are allowed")
    if not is_text(text):
        raise UsageError(f"{name}: must be valid UTF-8")
    return text


def _texts(body: dict[str, Any], name: str) -> tuple[str, ...]:
    texts = body.get(name) or []
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UsageError(f"{name}: must be a list of strings")
    return tuple(texts)
