"""What `wavebus sidecar` gives the server that it starts."""

from __future__ import annotations

import sys

import click
import pytest

from bus._cli import options
from bus._cli.main import wavebus
from bus.errors import UsageError
from sidecar._cli_plan import SidecarPlan, make_vllm
from sidecar._vllm.connection_http import HttpConnection
from sidecar._vllm.engine import VllmAdapter
from sidecar._vllm.plugin.environment import (
    BOOT_CLOSED,
    TRUST_KV_CONNECTORS,
    trusted_kv_connectors,
)


@pytest.mark.parametrize(("chosen", "given"), [(None, "1"), ("0", "0")])
def test_a_server_boots_with_closed_admission_unless_it_is_to_be_open(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, given: str
) -> None:
    """It has its checkpoint's weights, and its group may serve others."""
    monkeypatch.delenv(BOOT_CLOSED, raising=False)
    if chosen is not None:
        monkeypatch.setenv(BOOT_CLOSED, chosen)
    engine = make_vllm(SidecarPlan(), (sys.executable,))
    assert isinstance(engine, VllmAdapter)
    assert isinstance(engine._vllm, HttpConnection)
    assert engine._vllm.server is not None
    assert engine._vllm.server.prepared.env[BOOT_CLOSED] == given


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "Qwen/Qwen3-8B"),
        ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
        ("vllm", "serve", "m", "--port", "8000"),
    ],
)
def test_a_servers_command_stands_after_two_dashes(words: tuple[str, ...]) -> None:
    """Else the sidecar would take its options for its own; the error says so."""
    with pytest.raises(click.UsageError) as refused:
        wavebus.main(["sidecar", *words], standalone_mode=False)
    assert "Put -- before the command of a vLLM server" in refused.value.message
    with pytest.raises(click.UsageError) as other:
        wavebus.main(["sidecar", "--nme", "x"], standalone_mode=False)
    assert "Put --" not in other.value.message


def test_trusted_connectors_are_known_to_the_sidecar_and_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the environment: a server that is started here has the sidecar's."""
    monkeypatch.setenv(TRUST_KV_CONNECTORS, "")
    monkeypatch.setattr(
        options, "configure_log", lambda *_: None
    )  # it would be that of later tests
    asked = ["--trust-kv-connector", "One", "--trust-kv-connector", "Two", "--engine", "vllm"]
    with pytest.raises(UsageError, match="--engine=vllm"):
        # By the command above it: click keeps a command's help option as its first call made it.
        wavebus.main(["sidecar", *asked], standalone_mode=False)
    assert trusted_kv_connectors() == {"One", "Two"}
    engine = make_vllm(SidecarPlan(), (sys.executable,))
    assert isinstance(engine, VllmAdapter)
    assert isinstance(engine._vllm, HttpConnection)
    assert engine._vllm.server is not None
    assert trusted_kv_connectors(engine._vllm.server.prepared.env) == {"One", "Two"}
