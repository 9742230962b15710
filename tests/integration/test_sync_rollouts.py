"""The rollout client in threads without an event loop."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from bus.errors import BusClosed, UsageError
from trainer_agent import SyncRolloutClient, SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.conftest import Bus

PROMPT = [5, 9, 77]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0}
LONG = SAMPLED | {"max_tokens": 400}


def until_streaming(client: SyncRolloutClient, attempts: int) -> None:
    """So many requests have engines, or more."""
    while len(client._connected()[1]._pool.attempts) < attempts:
        time.sleep(0)


def test_threads_share_a_client_while_another_one_trains(bus: Bus) -> None:
    """The same weights are sent as a new version meanwhile: nobody's tokens change by it."""
    bus.sidecar("e0", "--step-ms", "5")
    weights = load_file(f"{bus.checkpoint.folder}/model.safetensors")

    def talk(client: SyncRolloutClient, number: int) -> list[Any]:
        params = SAMPLED | {"seed": number}
        whole = client.generate(PROMPT, params, session_id=f"s{number}").choices[0].token_ids
        client.finish_session(f"s{number}")
        streamed = [t for delta in client.stream(PROMPT, params) for t in delta.token_ids]
        many = [d.choices[0].token_ids for _, d in client.generate_many([PROMPT] * 2, params)]
        return [whole, tuple(streamed), *many]

    with (
        SyncTrainerAgent(bus.address) as agent,
        SyncRolloutClient(bus.address) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        alone = talk(client, 3)
        assert alone[0] == alone[1] == alone[2] != alone[3]
        talks = [threads.submit(talk, client, number) for number in range(8)]
        until_streaming(client, 1)
        agent.update_weights(weights)
        found = [each.result() for each in talks]
    assert found[3] == alone
    assert len({whole for whole, *_ in found}) == 8


class Letters:
    """A tokenizer: one character for each token, and a template that knows the texts alone."""

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [ord(char) - 65 for message in messages for char in message["content"]]


def test_a_chat_is_the_same_without_an_event_loop(bus: Bus) -> None:
    bus.sidecar("e0")
    greedy = {"temperature": 0.0, "max_tokens": 5}
    with SyncRolloutClient(bus.address, tokenizer=Letters()) as client:
        done = client.chat([{"role": "user", "content": "FJ"}], sampling_params=greedy)
        assert done.choices[0].token_ids == client.generate([5, 9], greedy).choices[0].token_ids
        assert done.messages[0]["content"] == done.choices[0].text


def test_a_generator_that_is_closed_leaves_nothing_under_way(bus: Bus) -> None:
    bus.sidecar("e0", "--step-ms", "5")
    with SyncRolloutClient(bus.address) as client:
        stream = client.stream(PROMPT, LONG)
        next(stream)
        many = client.generate_many([PROMPT] * 3, SAMPLED, as_completed=True)
        next(many)
        stream.close()
        many.close()
        while client._connected()[1]._pool.attempts:
            time.sleep(0)
        with pytest.raises(UsageError, match="vocabulary"):
            client.generate([10**6], SAMPLED)


def test_a_call_ends_when_its_client_is_closed(bus: Bus) -> None:
    bus.sidecar("e0", "--step-ms", "50")
    with ThreadPoolExecutor(2) as threads:
        with SyncRolloutClient(bus.address) as client:
            calls: list[Future[Any]] = [
                threads.submit(client.generate, PROMPT, LONG),
                threads.submit(list, client.stream(PROMPT, LONG)),
            ]
            until_streaming(client, 2)
        for call in calls:
            with pytest.raises(BusClosed):
                call.result()
    with pytest.raises(BusClosed, match="connect"):
        client.generate(PROMPT, SAMPLED)


def test_a_progress_bar_counts_prompts_and_needs_tqdm(
    bus: Bus, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.sidecar("e0")
    with SyncRolloutClient(bus.address) as client:
        if pytest.importorskip("tqdm"):
            assert len(list(client.generate_many([PROMPT] * 6, SAMPLED, progress=True))) == 6
            assert "6/6" in capsys.readouterr().err
        assert len(list(client.generate_many([PROMPT] * 6, SAMPLED))) == 6
        assert not capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as where it is not installed
        with pytest.raises(UsageError, match="pip install tqdm"):
            next(client.generate_many([PROMPT], SAMPLED, progress=True))


def test_calls_in_a_forked_process_raise_at_once(bus: Bus) -> None:
    """They have neither the thread nor the connection of their parent, and may have their own."""
    bus.sidecar("e0")
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "generate": lambda client, _: client.generate(PROMPT, SAMPLED),
        "stream": lambda client, _: next(client.stream(PROMPT, SAMPLED)),
        "generate_many": lambda client, _: next(client.generate_many([PROMPT], SAMPLED)),
        "finish_session": lambda client, _: client.finish_session("s"),
        "close": lambda client, _: client.close(),
        "status": lambda _, agent: agent.status(),
        "update_weights": lambda _, agent: agent.update_weights({}),
        "paused": lambda _, agent: agent.paused().__enter__(),
        "close of an agent": lambda _, agent: agent.close(),
    }
    with SyncTrainerAgent(bus.address) as agent, SyncRolloutClient(bus.address) as client:
        client.generate(PROMPT, SAMPLED)
        found, told = os.pipe()
        if not (pid := os.fork()):
            with contextlib.suppress(BaseException), os.fdopen(told, "w") as tells:
                for name, call in calls.items():
                    try:
                        call(client, agent)
                    except BusClosed as error:
                        tells.write(f"{name}: {error}\n")
                with SyncRolloutClient(bus.address) as own:
                    tells.write(f"{len(own.generate(PROMPT, SAMPLED).choices[0].token_ids)} tokens")
            os._exit(0)
        os.close(told)
        with os.fdopen(found) as tells:
            lines = tells.read().splitlines()
        os.waitpid(pid, 0)
        assert [line.split(":")[0] for line in lines] == [*calls, "30 tokens"]
        assert all(bus.address in line for line in lines[:-1])
        client.generate(PROMPT, SAMPLED)
