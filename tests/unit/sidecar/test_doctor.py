"""What `wavebus doctor --attach` says of a server, which is a small one of the test's own."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec

from bus.messages import NO_LIMITS
from sidecar._doctor import _GENERATE, _RL_ROUTES, _server
from sidecar._vllm.plugin import kv_connectors, worker_rpc
from sidecar._vllm.plugin.environment import TRUST_KV_CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@contextlib.contextmanager
def a_server(facts: Any) -> Iterator[str]:
    """The routes of a vLLM that the doctor asks, with our plugin in its workers; its URL."""
    answers = {worker_rpc.ASK_PRESENCE: "wavebus's plugin", worker_rpc.ASK_FACTS: facts}
    routes = (*_RL_ROUTES, _GENERATE)

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"paths": {each: {} for each in routes}})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer({"results": [answers[asked["method"]]]})

        def _answer(self, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_each_connector_has_a_line_with_what_it_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused one fails; one that is trusted here does not."""
    monkeypatch.setenv(TRUST_KV_CONNECTORS, "Own")
    connectors = {
        "OffloadingConnector": kv_connectors.SALTED,
        "ExampleConnector": kv_connectors.BY_TOKENS,
        "Own": kv_connectors.UNKNOWN,
    }
    facts = worker_rpc.WorkerFacts("vllm", "", 0, 0, "", (), {}, NO_LIMITS, connectors)
    with a_server(msgspec.to_builtins(facts)) as url:
        checks = _server(url)
    assert [(each.name, each.state) for each in checks] == [
        ("server", "ok"),
        ("RL routes", "ok"),
        ("server's plugin", "ok"),
        ("KV connector", "ok"),
        ("KV connector", "fail"),
        ("KV connector", "ok"),
    ]
    said = [each.detail for each in checks[3:]]
    assert said[0] == "OffloadingConnector: salted; updates are allowed"
    assert said[1].startswith("ExampleConnector: keyed by tokens alone: updates are refused")
    assert said[2] == "Own: trusted; updates are allowed"


def test_a_plugin_that_says_something_else_is_no_reason_to_break() -> None:
    with a_server({"of": "another version"}) as url:
        [plugin] = [each for each in _server(url) if each.name == "server's plugin"]
    assert plugin.state == "warn"


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar asks none either; and a proxy of another host has another loopback."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    facts = worker_rpc.WorkerFacts("vllm", "", 0, 0, "", (), {}, NO_LIMITS, {})
    with a_server(msgspec.to_builtins(facts)) as url:
        assert {each.state for each in _server(url)} == {"ok"}
