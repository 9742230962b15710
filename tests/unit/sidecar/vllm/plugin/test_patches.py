"""The registry of what is wrapped inside vLLM: a seam that does not fit turns off what depends on
it, nothing else, and `wavebus status` says why.

Each test changes the source of the installed vLLM in memory, as a new release might. Nothing of
vLLM is imported.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bus._cli.main import run
from bus._cli.status import _table
from bus._protocol.broker.broker import Broker
from bus._protocol.core.config import BrokerConfig
from bus._protocol.core.effects import Note
from bus._vllm import source as vllm_source
from bus._vllm.seams import Registry, Seam, Wrap
from bus._vllm.source import SourceTree
from bus._vllm.versions import TESTED, untested_reason
from bus.errors import UsageError
from bus.messages import Join, Status, StatusRequest
from sidecar._vllm.plugin import installation
from sidecar._vllm.plugin import worker_rpc as worker_facts
from sidecar._vllm.plugin.core.admission import SET_ADMISSION
from sidecar._vllm.plugin.installation import features_of
from sidecar._vllm.plugin.operations import PERFORM
from sidecar._vllm.plugin.patches import REGISTRY
from sidecar._vllm.plugin.vllm_names import IPC_ENGINE, NCCL_ENGINE, NIXL, SCHEDULER
from tests.support.new_vllm import NewVllm, check_nothing_is_missed, installed, write
from tests.support.seams import install
from tests.unit.bus._builders import envelope, facts, only
from tests.vllm._vllm import require_vllm

if TYPE_CHECKING:
    from pathlib import Path

    from bus._vllm.seams import Report

require_vllm()
ROOT = installed()
INTACT = SourceTree(ROOT)
NEXT = NewVllm(INTACT)

CORE = "vllm.v1.engine.core:EngineCoreProc"
LOCKSTEP = "vllm.v1.engine.core:DPEngineCoreProc"
SUM = "vllm.config.parallel:ParallelConfig.sync_dp_state"
STATUS = {"core_status", "pause_lease"}
LOCKSTEP_STATUS = {"lockstep_core_status", "lockstep_pause_lease"}
STAGED_TOGETHER = {"lockstep_staged_updates"}
LIMITS = {"request_limits", "exact_seeds", "token_checks"}
UPDATES = {"weight_updates", "staged_updates", "lockstep_staged_updates"}

# For each seam: what a new vLLM has changed, and all that goes off.
KV = {"prefix_cache_versions", "held_kv", "kv_handover"}
CHANGES: dict[str, list[tuple[str, str, set[str]]]] = {
    "weight transfer engine": [
        ("rename", "vllm.distributed.weight_transfer.base:WeightTransferInitInfo", UPDATES),
        (
            "reshape",
            "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
            UPDATES,
        ),
    ],
    "model loading": [
        ("rename", "vllm.model_executor.model_loader.utils:initialize_model", UPDATES),
        (
            "reshape",
            "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
            UPDATES,
        ),
    ],
    "worker methods": [("rename", "vllm.v1.worker.worker_base:WorkerWrapperBase", UPDATES)],
    "worker engines": [
        (
            "reshape",
            "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.create_engine",
            {"vllm_worker_engines", "staged_worker_engines"},
        )
    ],
    "staged worker engines": [
        (
            "without post_unpack_func=self.model.load_weights",
            f"{NCCL_ENGINE}.receive_weights",
            {"staged_worker_engines"},
        ),
        ("reshape", f"{IPC_ENGINE}.receive_weights", {"staged_worker_engines"}),
        (
            "without stream.synchronize()",
            "vllm.distributed.weight_transfer.packed_tensor:packed_nccl_broadcast_consumer",
            {"staged_worker_engines"},
        ),
    ],
    "core status": [("reshape", f"{CORE}._process_engine_step", STATUS | LOCKSTEP_STATUS)],
    "lockstep core status": [
        (
            "reshape",
            f"{LOCKSTEP}._has_global_unfinished_reqs",
            LOCKSTEP_STATUS | {"lockstep_staged_updates"},
        ),
    ],
    "pause lease": [
        ("rename", f"{CORE}._send_abort_outputs", {"pause_lease", "lockstep_pause_lease"}),
    ],
    "lockstep pause fixes": [
        ("reshape", f"{LOCKSTEP}._pause_complete", {"lockstep_pause_fixes", "dp_coordinator"}),
    ],
    "admission": [
        (
            "without req, request_wave = request",
            f"{CORE}._handle_client_request",
            {"admission", "lockstep_admission", "closed_answer"},
        ),
    ],
    "closed answer": [
        (
            "without req_state.queue.put(request_output)",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            {"closed_answer"},
        ),
    ],
    "streamed versions": [
        (
            "reshape",
            "vllm.v1.engine.output_processor:RequestState._new_completion_output",
            {"streamed_versions"},
        ),
    ],
    "token checks": [
        ("rename", "vllm.renderers.base:BaseRenderer.validate_token_ids", {"token_checks"}),
    ],
    "request limits": [
        ("rename", "vllm.config.model:ModelConfig.get_vocab_size", LIMITS),
    ],
    "seeded draws": [
        ("rename", "vllm.v1.worker.gpu.sample.sampler:Sampler._sample_random", {"exact_seeds"}),
    ],
    "lockstep admission": [
        ("rename", f"{LOCKSTEP}.add_request", {"lockstep_admission", "dp_coordinator"}),
    ],
    "version labels": [
        ("rename", "vllm.v1.engine.core:EngineCore._attach_weight_version", {"version_labels"}),
    ],
    "prefix cache versions": [
        ("reshape", f"{CORE}.preprocess_add_request", KV),
        ("rename", "vllm.v1.request:Request.update_block_hashes", KV),
    ],
    "held keys and values": [
        ("reshape", "vllm.v1.engine.core:EngineCore._finish_pause", {"held_kv", "kv_handover"}),
    ],
    "KV hand-over": [
        ("reshape", f"{NIXL}.get_num_new_matched_tokens", {"kv_handover"}),
        ("rename", f"{SCHEDULER}._connector_finished", {"kv_handover"}),
    ],
    "KV connectors": [
        (
            "rename",
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache",
            {"prefix_cache_versions"},
        ),
    ],
    "swap": [
        ("reshape", f"{CORE}.reset_encoder_cache", {"staged_updates", "lockstep_staged_updates"}),
    ],
    "lockstep swap": [("rename", SUM, STAGED_TOGETHER), ("reshape", SUM, STAGED_TOGETHER)],
    "dp coordinator": [
        ("reshape", "vllm.v1.engine.coordinator:DPCoordinator.__init__", {"dp_coordinator"}),
        ("reshape", "vllm.v1.engine:EngineCoreOutputs", {"dp_coordinator"}),
    ],
    "lora adapters": [
        (
            "reshape",
            "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters",
            {"lora_updates"},
        ),
    ],
    "lora requests": [
        (
            "without self.lora_request = lora_request",
            "vllm.v1.request:Request.__init__",
            {"lora_updates"},
        ),
    ],
    "draft models": [
        (
            "rename",
            "vllm.v1.worker.worker_base:WorkerBase.supports_draft_weight_updates",
            {"draft_updates"},
        )
    ],
    "wake": [("reshape", "vllm.v1.engine.core:EngineCore.wake_up", {"sleep"})],
    "AsyncLLM": [
        ("reshape", "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", {"in_process"}),
    ],
    "routes in process": [
        ("rename", "vllm.entrypoints.launchers.app:build_app", {"in_process_routes"}),
    ],
    "routes": [
        (
            "without Response(status_code=503)",
            "vllm.entrypoints.serve.instrumentator.health:health",
            {"over_http"},
        )
    ],
    "CPU communicator": [
        (
            "rename",
            "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
            {"cpu_experts"},
        )
    ],
}
CASES = [
    pytest.param(how, target, off, id=f"{name}: {how} {target.partition(':')[2]}")
    for name, changes in CHANGES.items()
    for how, target, off in changes
]


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> None:
    """Changed trees take the files of the intact one that they leave alone, once these are read."""
    REGISTRY.check(INTACT)


def changed(how: str, target: str) -> SourceTree:
    kind, _, text = how.partition(" ")
    if kind == "without":
        return NEXT.without(target, text)
    return NEXT.renamed(target) if kind == "rename" else NEXT.reshaped(target)


def status_of(report: Report, *, lockstep: bool) -> tuple[str, dict[str, object]]:
    """What `wavebus status` prints of an engine with that vLLM, and the broker's join line."""
    engine = facts(features=features_of(report, lockstep=lockstep), untested="")
    broker = Broker(BrokerConfig())
    joining = Join("engine", "host", 7, engine, None)
    joined = broker.receive(b"e", envelope(joining, "e0"), joining, 0.0)
    [line] = [each for each in joined if isinstance(each, Note) and each.event == "peer_joined"]
    asked = StatusRequest()
    told = broker.receive(b"e", envelope(asked, "e0", seq=2, msg_id=2), asked, 1.0)
    return "\n".join(_table("tcp://127.0.0.1:7710", only(told, Status))), dict(line.fields)


def test_every_seam_has_a_change() -> None:
    assert set(CHANGES) == {seam.name for seam in REGISTRY.seams}


def test_the_installed_vllm_has_every_feature() -> None:
    report = REGISTRY.check(INTACT)
    assert report.reasons == {}
    assert set(report.features) == set(REGISTRY.features)
    assert untested_reason(report.version) == ""


@pytest.mark.parametrize(("how", "target", "off"), CASES)
def test_only_what_depends_on_it_goes_off_and_status_says_why(
    how: str, target: str, off: set[str]
) -> None:
    report = REGISTRY.check(changed(how, target))
    found = {name: why for name, why in report.features.items() if why}
    assert set(found) == off
    name = target.rpartition(".")[2].rpartition(":")[2]
    assert all(name in why for why in found.values()), found
    for lockstep in (False, True):
        concerned = {
            each.removeprefix("lockstep_") if each != "lockstep_pause_fixes" else each
            for each in off
            if lockstep or not each.startswith("lockstep_")
        }
        table, joined = status_of(report, lockstep=lockstep)
        assert {each for each in REGISTRY.features if f"{each} is off: " in table} == concerned
        assert ("features_off" in joined) == bool(concerned)
        for each in concerned:
            assert name in table
            assert f"{each}: " in str(joined["features_off"])


@pytest.mark.ci
@pytest.mark.parametrize("seam", REGISTRY.seams, ids=lambda seam: seam.name)
def test_whatever_a_seam_expects_it_is_missed(seam: Seam) -> None:
    check_nothing_is_missed(REGISTRY, seam, INTACT)


def test_dense_engines_never_depend_on_lockstep_code() -> None:
    """All of it gone: an engine that steps alone has every feature that it had."""
    report = REGISTRY.check(NEXT.renamed(LOCKSTEP))
    alone = features_of(report, lockstep=False)
    assert {name for name, why in alone.items() if why} == {"dp_coordinator"}


def test_a_seam_can_be_switched_off() -> None:
    report = REGISTRY.check(INTACT, {"WAVEBUS_CORE_GUARD": "0"})
    off = {name: why for name, why in report.features.items() if why}
    assert off == dict.fromkeys(("lockstep_pause_fixes", "dp_coordinator"), "WAVEBUS_CORE_GUARD=0")


@pytest.mark.parametrize(
    ("version", "untested"),
    [
        *((f"{each}.0", False) for each in TESTED),
        ("0.33.1rc2.dev4+g0a1b2c3", False),
        ("0.31.2", True),
        ("0.34.0", True),
        ("1.33.0", True),
        ("", True),
    ],
)
def test_an_unknown_vllm_is_reported_as_untested(version: str, untested: bool) -> None:
    """It works with whatever fits."""
    said = untested_reason(version)
    assert bool(said) is untested
    assert not untested or f"wavebus was run on {' and '.join(TESTED)}" in said


def test_a_newer_vllm_that_fits_supports_everything_and_is_untested(tmp_path: Path) -> None:
    text = INTACT.text("vllm._version")
    newer = text.replace(INTACT.version, "0.34.0")
    report = REGISTRY.check(SourceTree(ROOT, {"vllm/_version.py": newer}))
    assert report.version == "0.34.0"
    assert not any(report.features.values())
    assert "0.34.0 is untested" in untested_reason(report.version)


def test_a_file_in_a_later_pythons_syntax_is_named() -> None:
    """It turns off what depends on it, and the doctor does not fail."""
    path = INTACT.module_path("vllm.v1.engine.coordinator")
    report = REGISTRY.check(INTACT.changed({path: "this is no Python"}))
    off = {name: why for name, why in report.features.items() if why}
    assert list(off) == ["dp_coordinator"]
    assert "this Python can't parse its file" in off["dp_coordinator"]


def test_without_a_vllm_every_feature_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    installation.report.cache_clear()
    monkeypatch.setattr(vllm_source, "find_spec", lambda _: None)
    # Other tests of this process may have installed seams.
    monkeypatch.setattr(installation, "_installed", set())
    try:
        report = installation.report()
        assert set(report.features.values()) == {"vLLM is not installed here"}
        assert installation.install_seam("swap") == "vLLM is not installed here"
    finally:
        installation.report.cache_clear()


def test_workers_get_every_method_that_sidecars_ask_for() -> None:
    seam = REGISTRY.seam("worker methods")
    names = {name for _, name, _ in seam.sets}
    asked = {
        getattr(worker_facts, name)
        for name in (
            "ASK_FACTS",
            "ASK_REQUESTS",
            "ASK_DRAFT",
            "ASK_LOADING",
            "ASK_PRESENCE",
            "SWAP",
            "CALL_OFF",
            "EXPECT_SWAP",
            "JOIN_RUN",
            "CLEAR_CACHES",
        )
    }
    assert names == asked | {PERFORM, SET_ADMISSION}
    answered = {method for each in REGISTRY.seams for method, _ in each.answers}
    assert answered <= names


def test_two_wraps_of_one_method_have_a_defined_order() -> None:
    """However many seams fit; all of them are of one kind of process, and so installed at once."""
    wrapping: dict[str, set[str]] = {}
    for seam in REGISTRY.seams:
        for part in (seam.common, *seam.forms):
            for wrap in part.wraps:
                wrapping.setdefault(wrap.target, set()).add(seam.name)
    several = {target: names for target, names in wrapping.items() if len(names) > 1}
    assert {target: set(names) for target, names in REGISTRY.nesting.items()} == several
    for target, names in several.items():
        assert len({REGISTRY.seam(name).process for name in names}) == 1
        undefined = replace(REGISTRY, nesting={target: REGISTRY.nesting[target][:-1]})
        with pytest.raises(ValueError, match="nesting"):
            undefined.wraps(dict.fromkeys(names, "only"))


class Engine:
    """What two seams wrap a method of, and a third one where it is inherited."""

    def run(self, calls: list[str]) -> None:
        calls.append("vLLM")


class LockstepEngine(Engine):
    """It inherits the method."""


def _calls(name: str) -> Any:
    def around(original: Any, engine: Engine, calls: list[str]) -> None:
        calls.append(name)
        original(engine, calls)

    return around


status_around, lease_around, lockstep_around = map(_calls, ("status", "lease", "lockstep"))


@pytest.mark.parametrize("without", ["", "status", "lease", "lockstep"])
@pytest.mark.parametrize("seams", list(permutations(("status", "lease", "lockstep"))))
def test_wraps_nest_as_defined_whatever_is_installed_first(
    seams: tuple[str, ...], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seam that does not fit leaves the others as they were."""
    targets = {"status": "Engine", "lease": "Engine", "lockstep": "LockstepEngine"}
    wraps = {
        name: Wrap(f"vllm.engine:{owner}.run", "self, calls", f"{__name__}:{name}_around")
        for name, owner in targets.items()
    }
    nesting = {wraps["status"].target: ("status", "lease")}
    registry = Registry({}, tuple(Seam(n, (), wraps=[wraps[n]]) for n in seams), nesting)
    monkeypatch.setattr(installation, "REGISTRY", registry)
    plain = type("Engine", (), dict(vars(Engine)))
    module = SimpleNamespace(Engine=plain, LockstepEngine=type("LockstepEngine", (plain,), {}))
    installed = [name for name in seams if name != without]
    installation.apply_patches(dict.fromkeys(installed, "only"), lambda _: module)
    for engine, order in (
        (module.Engine(), ("lease", "status")),
        (module.LockstepEngine(), ("lockstep", "lease", "status")),
    ):
        calls: list[str] = []
        engine.run(calls)
        assert calls == [*(name for name in order if name != without), "vLLM"]


def test_cores_answer_their_methods_and_no_others(core_module: Any) -> None:
    install(core_module, "admission")
    core = core_module.EngineCoreProc()
    assert core.collective_rpc(SET_ADMISSION, kwargs={"ends": False})[0]["admits"] is True
    assert core.calls == []
    assert core.collective_rpc("wavebus_swap", None, (), None) == [("wavebus_swap", None, (), None)]


def test_wraps_keep_the_kind_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of a class, of its objects, or of neither is called as before."""

    class Theirs:
        def plain(self, value: int) -> int:
            return value

        @classmethod
        def of_class(cls, value: int) -> tuple[str, int]:
            return cls.__name__, value

        @staticmethod
        def of_none(value: int) -> int:
            return value

    def twice(original: Any, *args: Any) -> Any:
        return original(*args[:-1], 2 * args[-1])

    for name in ("plain", "of_class", "of_none"):
        installation._wrap(Theirs, name, twice)
    assert (Theirs().plain(2), Theirs().of_class(2), Theirs.of_class(3)) == (
        4,
        ("Theirs", 4),
        ("Theirs", 6),
    )
    assert (Theirs.of_none(2), Theirs().of_none(2)) == (4, 4)
    assert Theirs.plain.__name__ == "plain"


def test_a_folder_a_package_and_a_wheel_are_read_alike(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "")
        packed.writestr("vllm/_version.py", "__version__ = version = '9.9.9'\n")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "open")
    trees = [SourceTree.at(path) for path in (wheel, tmp_path / "open", tmp_path / "open" / "vllm")]
    assert [tree.version for tree in trees] == ["9.9.9"] * 3
    with pytest.raises(UsageError, match="no vLLM there"):
        SourceTree.at(tmp_path)


@pytest.mark.ci
def test_the_doctor_shows_what_a_vllm_supports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 if every feature works, 1 if one is off, 2 if there is no vLLM."""
    path = INTACT.module_path("vllm.config.parallel")
    text = INTACT.text("vllm.config.parallel").replace("def sync_dp_state", "def sync_state")
    other = write(ROOT, {path: text}, tmp_path / "other")
    assert run(["doctor", "--vllm", str(ROOT)]) == 0
    assert run(["doctor", "--vllm", str(other), "--json"]) == 1
    good, told = capsys.readouterr().out.split("\n[")
    assert "staged_updates" in good
    assert " off" not in good
    [found] = json.loads(f"[{told}")
    off = {name: why for name, why in found["features"].items() if why}
    assert list(off) == ["lockstep_staged_updates"]
    assert "sync_dp_state" in off["lockstep_staged_updates"]
    assert run(["doctor", "--vllm", str(ROOT), "--vllm", str(other), "--markdown"]) == 1
    table = capsys.readouterr().out
    row = next(line for line in table.split("\n") if "`lockstep_staged_updates`" in line)
    assert row.endswith("| ok | off |")
    assert run(["doctor", "--vllm", str(tmp_path)]) == 2
    assert run(["doctor", "--markdown"]) == 2
