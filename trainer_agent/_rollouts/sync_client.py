"""The rollout client for programs without an event loop."""

from __future__ import annotations

import functools
import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer_agent._bus_thread import BusThread
from trainer_agent._rollouts.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Mapping, Sequence

    from trainer_agent._rollouts.results import ChatCompletion, Completion, TokenDelta


class SyncRolloutClient(BusThread[RolloutClient]):
    """Blocks where :class:`trainer_agent.RolloutClient` awaits; arguments and errors are the same.

    ::

        with SyncRolloutClient("tcp://127.0.0.1:7710", group="policy") as rollouts:
            done = rollouts.generate([5, 9, 77], {"max_tokens": 64})

    Several threads may call the client at the same time. Use each generator in one thread, and
    exhaust or close it.

    Args:
        args: as :class:`trainer_agent.RolloutClient`.
        kwargs: as :class:`trainer_agent.RolloutClient`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(RolloutClient).bind(*args, **kwargs)  # raises here, not in the thread
        super().__init__(functools.partial(RolloutClient, *args, **kwargs))

    def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> Completion:
        """Generates ``n`` choices for one prompt, as :meth:`RolloutClient.generate` does."""
        return self._call(
            lambda: self._async.generate(prompt_token_ids, sampling_params, **options)
        )

    def stream(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> Generator[TokenDelta]:
        """Yields new tokens as they arrive, as :meth:`RolloutClient.stream` does."""
        return self._iterate(self._async.stream(prompt_token_ids, sampling_params, **options))

    def generate_many(
        self, prompts: Iterable[Sequence[int]], sampling_params: Mapping[str, Any], **options: Any
    ) -> Generator[tuple[int, Completion]]:
        """Generates for many prompts, as :meth:`RolloutClient.generate_many` does.

        All prompts are read before the first request is sent, in the caller's thread.
        """
        return self._iterate(self._async.generate_many(list(prompts), sampling_params, **options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> ChatCompletion:
        """Generates the next message of a conversation, as :meth:`RolloutClient.chat` does."""
        return self._call(lambda: self._async.chat(messages, tools, sampling_params, **options))

    def abort_requests(self, request_ids: Collection[str] | None = None) -> int:
        """Ends requests, which keep their tokens, as :meth:`RolloutClient.abort_requests` does."""
        portal, client = self._connected()
        return portal.call(client.abort_requests, request_ids)

    def finish_session(self, session_id: str) -> None:
        """Ends a session, as :meth:`RolloutClient.finish_session` does."""
        portal, client = self._connected()
        portal.call(client.finish_session, session_id)
