"""Frameworks' own clients train engines by ``wavebus gateway``, over NCCL and CUDA IPC.

    python -m tests.gpu.gateway --json-out gateway.json
    python -m tests.gpu.gateway --json-out gateway.json --only a,c
    python -m tests.gpu.gateway --json-out gateway.json --device cpu --only a,b-nccl

All is on the first GPU (:mod:`tests.gpu.one_gpu`). The cases:

a. TRL's ``GRPOTrainer``, unmodified, in server mode: 20 steps with two engines. The reward must
   rise, and the logprobs of engines and trainer must agree to 0.01 on average, in bf16. Once with
   staged updates; once in pauses, which a callback asks for, since TRL asks for none.
b. SkyRL's ``RemoteInferenceClient`` and ``SkyrlWeightSyncClient``, with two engines that were
   booted for ``nccl``, and two for ``ipc``. After an update, staged and in a pause, greedy tokens
   and the sums of ``/weight_checker`` must be those of an engine that was booted with the
   checkpoint which was sent. A request is under way, and must get all tokens that it asked for.
c. Whole updates of a larger model with vLLM's trainer engine by the gateway, and by
   ``agent.update_weights``, in turn, staged. The medians must differ by no more than a tenth.

Each case is a process of its own with a time limit, and has a gateway of its own. Prints one table,
last; exits with 1 if anything is wrong, or nothing was run. Beside vLLM, wavebus and what these
need: trl, accelerate, datasets, pyarrow, pandas, python-dateutil, six, multiprocess, dill and
xxhash for a; skyrl, cloudpathlib, loguru and rich for b. (The path of their folder must have
``site-packages`` in it, or dill pickles whole modules.)

``--device cpu`` runs the same without GPUs, where gloo takes the place of NCCL and files that of
IPC (:mod:`tests.support.nccl_pair`, :mod:`tests.support.ipc_pair`). There ``/weight_checker``
verifies nothing, and no times are judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.gpu import one_gpu
from tests.gpu.serving import PROMPTS, EngineSpec, Served, Serving, served, wavebus
from trainer_agent import SyncTrainerAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trainer_agent._options import How

LIMIT_S: Final = {"a": 120.0, "b-nccl": 120.0, "b-ipc": 120.0, "c": 240.0}
STEPS: Final = 20
VOCAB: Final = 256
HIDDEN: Final = 256
LONG: Final = 300  # tokens of requests that are under way
ROUNDS: Final = 5
MOST_LOGP: Final = 1e-2
LEAST_RISE: Final = 0.1
MOST_RATIO: Final = 1.1
PACKED_BYTES: Final = 1 << 20  # a buffer of SkyRL's: an update has several
LETTER_TASKS: Final = ("ab", "cd", "ef", "gh")
CASES: Final = {
    "a": ("trl staged", "trl paused"),
    "b-nccl": ("skyrl nccl",),
    "b-ipc": ("skyrl ipc",),
    "c": ("beside the agent",),
}
ENGINES: Final = {
    "a": ("nccl",),
    "b-nccl": ("nccl", "fresh"),
    "b-ipc": ("ipc", "fresh"),
    "c": ("large",),
}


@dataclass(frozen=True)
class Given:
    """What a case is given: where the engines of each group are, and the settings."""

    broker: str
    device: str
    folder: str
    logs: str
    layers: int
    transport: str
    engines: dict[str, list[str]]

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def place(self) -> str:
        return "cpu" if self.cpu else "cuda:0"


@dataclass
class Verdict:
    """A line of the table."""

    name: str
    result: str = "not run"
    facts: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


# -- what the cases share -------------------------------------------------------------


@contextlib.contextmanager
def gateway(given: Given, group: str, *options: str) -> Iterator[str]:
    """A gateway of a group; its URL."""
    command = [*wavebus(), "gateway", "--broker", given.broker, "--group", group]
    command += ["--listen", "127.0.0.1:0", "--log-format", "json", *options]
    with (Path(given.logs) / f"gateway-{group}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the gateway has not started"
            yield url
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def counted(given: Given, group: str) -> Iterator[Counter[How]]:
    """How the updates of a group that are committed in a block are loaded, by the broker's log."""
    log = Path(given.logs) / "broker.log"
    known, ways = log.stat().st_size, Counter[Any]()
    yield ways
    pauses: set[str] = set()
    for line in log.read_bytes()[known:].splitlines():
        told = json.loads(line) if line.startswith(b"{") else {}
        if told.get("group") != group:
            continue
        match told["event"]:
            case "paused":
                pauses.add(told["update_id"])
            case "resumed":
                pauses.discard(told["update_id"])
            case "committed":
                ways["paused" if pauses else "staged"] += 1


def all_served(given: Given, group: str) -> list[Served]:
    """What each engine of a group serves."""
    return [served(url) for url in given.engines[group]]


def call(url: str, method: str = "POST") -> Any:
    request = urllib.request.Request(url, b"" if method == "POST" else None, method=method)
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def bring_stand_ins() -> None:
    """In place of NCCL and CUDA IPC, in a trainer on a CPU."""
    from tests.support import ipc_pair, nccl_pair  # noqa: F401, PLC0415 - they need vLLM


# -- a: TRL ---------------------------------------------------------------------------


def share_of_low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward."""
    return [sum(token < VOCAB // 2 for token in ids) / len(ids) for ids in completion_ids]


def pauses_around_updates(url: str) -> Any:
    """A callback that has the group paused before each step's update, and resumed after it.

    TRL's trainer pauses nothing, and asks for answers as soon as it has sent weights.
    """
    import transformers  # noqa: PLC0415 - slow

    def resume_after(label: str) -> None:
        while call(f"{url}/weight_info", "GET")["weight_version"] == label:
            time.sleep(0.005)
        call(f"{url}/resume")

    class PausesAroundUpdates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            label = call(f"{url}/weight_info", "GET")["weight_version"]
            call(f"{url}/pause?mode=keep")
            threading.Thread(target=resume_after, args=(label,), daemon=True).start()

    return PausesAroundUpdates()


def trl(given: Given, how: How) -> list[Verdict]:
    """The trainer is TRL's as it is."""
    from examples.gateway_skyrl import free_port  # noqa: PLC0415 - slow

    if given.cpu:
        bring_stand_ins()
    import datasets  # noqa: PLC0415 - where a case needs it
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415 - after the stand-in
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - same

    if given.cpu:  # TRL asks for a CUDA device, which the stand-in needs not
        join = VLLMClient.init_communicator
        VLLMClient.init_communicator = lambda client, **_: join(client, "cuda")
    with counted(given, "nccl") as ways, gateway(given, "nccl") as url:
        trainer = GRPOTrainer(
            model=str(Path(given.folder) / "0"),
            reward_funcs=share_of_low_tokens,
            train_dataset=datasets.Dataset.from_dict({"prompt": list(LETTER_TASKS) * STEPS}),
            callbacks=[pauses_around_updates(url)] if how == "paused" else [],
            args=GRPOConfig(
                output_dir=str(Path(given.folder) / "trl"),
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=url,
                vllm_group_port=free_port(),
                max_steps=STEPS,
                per_device_train_batch_size=64,
                num_generations=16,
                max_completion_length=16,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                model_init_kwargs={"dtype": "bfloat16"},
                bf16=True,
                use_cpu=given.cpu,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=7,
            ),
        )
        trainer.train()
        label = call(f"{url}/weight_info", "GET")["weight_version"]
    steps = [each for each in trainer.state.log_history if "reward" in each]
    differences = {
        which: max(step[f"sampling/sampling_logp_difference/{which}"] for step in steps)
        for which in ("mean", "max")
    }
    rewards = [step["reward"] for step in steps]
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
    one, other = all_served(given, "nccl")
    problems = [
        f"{len(steps)} steps" if len(steps) != STEPS else "",
        "" if last - first >= LEAST_RISE else f"the reward went from {first:.3f} to {last:.3f}",
        "" if differences["mean"] < MOST_LOGP else f"logprobs differ by {differences['mean']}",
        f"updates: {dict(ways)}" if ways != Counter({how: STEPS}) else "",
        one.difference(other) and f"engines differ: {one.difference(other)}",
    ]
    facts = {
        "steps": len(steps),
        "updates": dict(ways),
        "label": label,
        "reward": [round(each, 3) for each in (first, last)],
        "logp_difference": {which: round(each, 5) for which, each in differences.items()},
        "rewards": [round(each, 3) for each in rewards],
    }
    return [verdict(f"trl, {how}", problems, facts)]


# -- b: SkyRL -------------------------------------------------------------------------


class SkyrlCase:
    """Sends two checkpoints to a group, staged and in pauses.

    Args:
        given: what the case is given.
        backend: with which of SkyRL's trainer engines; the group has that name.
    """

    def __init__(self, given: Given, backend: str) -> None:
        from safetensors.torch import load_file  # noqa: PLC0415 - slow

        self._given = given
        self._backend = backend
        self._checkpoints = [
            load_file(Path(given.folder) / name / "model.safetensors", given.place)
            for name in ("1", "2")
        ]
        self._sent: dict[str, Tensor] = dict(self._checkpoints[0])

    def run(self) -> list[Verdict]:
        [self._fresh] = all_served(self._given, "fresh")
        options = ("--allow-pickled-handles",) if self._backend == "ipc" else ()
        verdicts = []
        ways: tuple[How, ...] = ("staged", "paused")
        with gateway(self._given, self._backend, *options) as url:
            for how in ways:
                with counted(self._given, self._backend) as updates:
                    problems, facts = asyncio.run(self._round(url, how))
                facts["updates"] = dict(updates)
                problems += [f"updates: {dict(updates)}"] if updates != {how: 2} else []
                verdicts.append(verdict(f"skyrl, {self._backend}, {how}", problems, facts))
        return verdicts

    async def _round(self, url: str, how: How) -> tuple[list[str], dict[str, Any]]:
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: PLC0415
            RemoteInferenceClient,
        )

        from examples.gateway_skyrl import Numbers  # noqa: PLC0415 - slow

        sampling = {"temperature": 1.0, "max_tokens": LONG, "logprobs": 1, "ignore_eos": True}
        asked = {"prompt_token_ids": [list(p) for p in PROMPTS], "sampling_params": sampling}
        async with RemoteInferenceClient(
            proxy_url=url,
            server_urls=[url],
            data_parallel_size=1,
            model_name="m",
            tokenizer=Numbers(),
        ) as driver:
            workers, _ = await driver.get_world_size()
            engine = await asyncio.to_thread(self._trainer_engine, url, workers)
            try:
                await self._send(driver, engine, 1, how)
                before = await asyncio.to_thread(all_served, self._given, self._backend)
                rollouts = asyncio.create_task(driver.generate(asked))
                took_s = await self._send(driver, engine, 0, how)
                answers = (await rollouts)["response_ids"]
            finally:
                await asyncio.to_thread(self._tear_down, engine)
        after = await asyncio.to_thread(all_served, self._given, self._backend)
        lengths = [len(each) for each in answers]
        problems = [each.difference(self._fresh) for each in after]
        if any(each.tokens == self._fresh.tokens for each in before):
            problems.append("the update changed nothing")
        if lengths != [LONG] * len(PROMPTS):
            problems.append(f"requests got {lengths} tokens")
        sums = {len(each.checksums) for each in (*after, self._fresh)}
        return problems, {"engines": workers, "sums": max(sums), "update_ms": round(took_s * 1000)}

    async def _send(self, driver: Any, engine: Any, number: int, how: How) -> float:
        """As SkyRL does: the driver pauses and resumes, and a worker sends. It takes so long."""
        self._sent.update(self._checkpoints[number])
        since_s = time.perf_counter()
        if how == "paused":
            await driver.pause_generation()
        await asyncio.to_thread(engine.send_weights)
        if how == "paused":
            await driver.resume_generation()
        return time.perf_counter() - since_s

    def _trainer_engine(self, url: str, workers: int) -> Any:
        """What `build_trainer_engine` of SkyRL makes on rank 0, without Ray. The gateway takes
        ``ipc`` in one call, so not packed."""
        from skyrl.backends.skyrl_train.weight_sync import (  # noqa: PLC0415
            control_plane,
            register,
            weight_senders,
        )
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415

        from examples.gateway_skyrl import free_port  # noqa: PLC0415 - slow
        from lab.bench.programs.native import NativeWeights  # noqa: PLC0415 - it needs vLLM

        register.register_trainer_engines()
        if self._backend == "nccl":
            made, _ = weight_senders.get_skyrl_nccl_trainer()
            info = made(
                master_address="127.0.0.1",
                master_port=free_port(),
                world_size=1 + workers,
                rank=0,
                packed=True,
                packed_buffer_size_bytes=PACKED_BYTES,
            )
            payloads = control_plane.nccl_init_payloads
        else:
            made, _ = weight_senders.get_skyrl_ipc_trainer()
            info, payloads = made(rank=0, packed=False), None
        return WeightTransferTrainerFactory.trainer_init(
            info,
            client=control_plane.SkyrlWeightSyncClient([url], 1, init_payload_fn=payloads),
            source=NativeWeights(self._sent),
        )

    def _tear_down(self, engine: Any) -> None:
        from skyrl.backends.skyrl_train.weight_sync import weight_senders  # noqa: PLC0415

        weight_senders.teardown_engine(engine)


def skyrl(given: Given, backend: str) -> list[Verdict]:
    if given.cpu:
        bring_stand_ins()
    if sys.version_info < (3, 12):  # SkyRL asks for 3.12, where this is Python's own
        import typing  # noqa: PLC0415

        import typing_extensions  # noqa: PLC0415

        typing.TypedDict = typing_extensions.TypedDict
    import transformers  # noqa: F401, PLC0415 - before SkyRL changes how it logs

    return SkyrlCase(given, backend).run()


# -- c: beside the agent --------------------------------------------------------------


def large_config(given: Given) -> Any:
    """The model of case c, of 8 billion parameters if it has all 36 layers."""
    from lab.bench.programs.vllm_trainer import MODELS  # noqa: PLC0415 - it needs vLLM

    if given.cpu:
        return MODELS["tiny"]
    return msgspec.structs.replace(MODELS["8b"], num_layers=given.layers)


def by_gateway(given: Given, weights: dict[str, Tensor]) -> float:
    """An update with vLLM's trainer engine and its HTTP client, in seconds; the second of two."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory  # noqa: PLC0415
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: PLC0415

    from bus._weight_transfer.allocation import World  # noqa: PLC0415 - where a case needs it
    from lab.bench.programs.native import NativeWeights  # noqa: PLC0415 - it needs vLLM
    from trainer_agent._vllm.init_info import native_info  # noqa: PLC0415 - same

    workers = len(given.engines["large"])
    options = ("--allow-pickled-handles",) if given.transport == "ipc" else ()
    with gateway(given, "large", *options) as url:
        info = native_info(
            given.transport,
            {"packed": given.transport == "nccl"},
            rank=0,
            world=World(0, 1 + workers, "127.0.0.1"),
        )
        trainer = WeightTransferTrainerFactory.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(url), source=NativeWeights(weights)
        )
        trainer.send_weights()
        settle(given)
        since_s = time.perf_counter()
        trainer.send_weights()
        took_s = time.perf_counter() - since_s
        trainer.shutdown()
    return took_s


def by_agent(given: Given, weights: dict[str, Tensor]) -> float:
    """The same with the agent and its transport."""
    backend = given.transport
    if given.cpu:
        backend = "gloo" if backend == "nccl" else "shm"
    with SyncTrainerAgent(given.broker, group="large", backend=backend, timeout_s=60.0) as agent:
        agent.wait_for_engines(len(given.engines["large"]))
        agent.update_weights(weights, how="staged")
        settle(given)
        since_s = time.perf_counter()
        agent.update_weights(weights, how="staged")
        return time.perf_counter() - since_s


def settle(given: Given) -> None:
    if not given.cpu:
        import torch  # noqa: PLC0415 - slow

        torch.cuda.synchronize()


def beside_the_agent(given: Given) -> list[Verdict]:
    """Both in turn. Each sends weights that differ from the other's, so that it shows if they did
    not arrive."""
    import torch  # noqa: PLC0415 - slow

    from lab.bench.programs.vllm_trainer import random_weights  # noqa: PLC0415 - same

    if given.cpu:
        bring_stand_ins()
    dtype = torch.float32 if given.cpu else torch.bfloat16
    weights = random_weights(large_config(given), given.place, dtype)
    times: dict[str, list[float]] = {"gateway": [], "agent": []}
    found: dict[str, list[Served]] = {"gateway": [], "agent": []}
    with counted(given, "large") as ways:
        for number in range(ROUNDS):
            for way, update in (("gateway", by_gateway), ("agent", by_agent)):
                weights["lm_head.weight"].neg_()
                times[way].append(update(given, weights))
                if number in (0, ROUNDS - 1):
                    found[way] += all_served(given, "large")
    medians = {way: statistics.median(each) for way, each in times.items()}
    ratio = medians["gateway"] / medians["agent"]
    [one, *others], [two, *_] = found["gateway"], found["agent"]
    problems = [each.difference(one) for each in others]
    problems += [each.difference(two) for each in found["agent"]]
    if one.tokens == two.tokens:
        problems.append("an update changed nothing")
    if ways != {"staged": 4 * ROUNDS}:
        problems.append(f"updates: {dict(ways)}")
    if ratio > MOST_RATIO and not given.cpu:
        problems.append(f"the gateway takes {ratio:.3f} times as long")
    size_bytes = sum(each.numel() * each.element_size() for each in weights.values())
    facts = {
        "updates": dict(ways),
        "mb": round(size_bytes / 1e6),
        "ratio": round(ratio, 3),
        **{f"{way}_ms": round(each * 1000, 1) for way, each in medians.items()},
        "rounds_ms": {way: [round(s * 1000, 1) for s in each] for way, each in times.items()},
    }
    return [verdict(f"gateway beside the agent, {given.transport}", problems, facts)]


def verdict(name: str, problems: list[str], facts: dict[str, Any]) -> Verdict:
    """Of a case that has ended: it is ok if no problem has a text."""
    detail = "; ".join(filter(None, problems))
    return Verdict(name, "WRONG" if detail else "ok", facts, detail)


# -- processes ------------------------------------------------------------------------


def run_case(name: str, given: Given, out: Path) -> None:
    """In the process of a case."""
    if not given.cpu:
        one_gpu.apart()
    what, _, rest = name.partition(" ")
    match what:
        case "trl":
            verdicts = trl(given, "staged" if rest == "staged" else "paused")
        case "skyrl":
            verdicts = skyrl(given, rest)
        case _:
            verdicts = beside_the_agent(given)
    out.write_text(json.dumps([dataclasses.asdict(each) for each in verdicts]), encoding="utf-8")


def judge(name: str, given: Given, limit_s: float) -> list[Verdict]:
    """Runs a case in a process of its own, with all that it starts; its lines."""
    slug = name.replace(" ", "-")
    out, log = Path(given.folder) / f"{slug}.json", Path(given.logs) / f"case-{slug}.log"
    command = [sys.executable, "-m", "tests.gpu.gateway", "case", name]
    command += [json.dumps(dataclasses.asdict(given)), str(out)]
    since_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
            result = f"FAILED with {process.returncode}"
        except subprocess.TimeoutExpired:
            result = f"not done within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took_s = round(time.monotonic() - since_s, 1)
    if out.exists():
        verdicts = [Verdict(**each) for each in json.loads(out.read_text(encoding="utf-8"))]
    else:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        sys.stdout.write("\n".join([f"-- {name}", *lines[-25:], ""]))
        verdicts = [Verdict(name, result, detail=lines[-1] if lines else "")]
    for each in verdicts:
        each.facts["case_s"] = took_s
    return verdicts


class Bench:
    """The engines of all cases, and what became of these."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from tests.gpu.native import environment  # noqa: PLC0415 - slow, and cases need it not
        from tests.support import pair_plugin  # noqa: PLC0415 - same

        self.options = options
        self.verdicts: list[Verdict] = []
        self.figures: dict[str, Any] = {}
        chosen = options.only.split(",")
        self.cases = [case for case in CASES if {case, case[0]} & set(chosen)]
        self._folder = folder
        cpu = options.device == "cpu"
        variables = environment(folder, cpu=cpu, share_gpu=not cpu)
        variables["VLLM_HOST_IP"] = "127.0.0.1"
        if cpu:
            variables |= {"OMP_NUM_THREADS": "1", pair_plugin.NCCL: "1", pair_plugin.IPC: "1"}
        os.environ.update(variables)
        self.serving = Serving(options.device, folder, options.logs, share_gpu=not cpu)

    def specs(self) -> list[EngineSpec]:
        """All engines that the cases need."""
        groups = dict.fromkeys(group for case in self.cases for group in ENGINES[case])
        tiny = ("--dtype=bfloat16", "--logprobs-mode=processed_logprobs", "--max-num-seqs=64")
        dtype = "float32" if self.options.device == "cpu" else "bfloat16"
        found = []
        for group in groups:
            if group == "fresh":
                found.append(EngineSpec(group, group, (0,), "1", everywhere=tiny))
                continue
            large = group == "large"
            args = ("--load-format=dummy", f"--dtype={dtype}") if large else tiny
            backend = self.options.transport if large else group
            checkpoint = "large" if large else "0"
            found += [
                EngineSpec(
                    f"{group}-{n}", group, (0,), checkpoint, backend=backend, everywhere=args
                )
                for n in range(2)
            ]
        return found

    def run(self) -> None:
        """Boots the engines, and runs all cases."""
        began_s = time.monotonic()
        given = Given(
            device=self.options.device,
            folder=str(self._folder),
            logs=str(self.options.logs),
            layers=self.options.layers,
            transport=self.options.transport,
            broker="",
            engines={},
        )
        make_models(given)
        self.serving.start_broker()
        specs = self.specs()
        for spec in specs:
            self.serving.start_engine(spec)
        given = dataclasses.replace(
            given, broker=self.serving.broker, engines=self._endpoints(specs)
        )
        self.figures["ready_s"] = round(time.monotonic() - began_s, 1)
        for case in self.cases:
            for name in CASES[case]:
                self.verdicts += judge(name, given, LIMIT_S[case])
                self.write()  # also if there is no time for the others

    def write(self, failure: str = "") -> None:
        """Writes what is known."""
        rows = [dataclasses.asdict(each) for each in self.verdicts]
        found = {**self.figures, "failure": failure, "rows": rows}
        self.options.json_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _endpoints(self, specs: list[EngineSpec]) -> dict[str, list[str]]:
        """Of all engines, by group, as soon as all have joined."""
        until_s = time.monotonic() + self.options.boot_s
        with SyncTrainerAgent(self.serving.broker, group="none", name="none") as agent:
            while time.monotonic() < until_s:
                engines = {e.name: e for group in agent.status().groups for e in group.engines}
                if all(spec.name in engines for spec in specs):
                    break
                if ended := self.serving.ended():
                    raise RuntimeError(f"ended: {', '.join(ended)}")
                time.sleep(0.2)
            else:
                raise TimeoutError(f"only {sorted(engines)} came up in {self.options.boot_s:g} s")
        self.figures["software"] = engines[specs[0].name].software
        found: dict[str, list[str]] = {}
        for spec in specs:
            found.setdefault(spec.group, []).append(engines[spec.name].endpoint)
        return found


def make_models(given: Given) -> None:
    """Three checkpoints of a tiny model in bf16, with a tokenizer; and the large one's config."""
    from lab.network import write_config  # noqa: PLC0415 - same
    from tests.gpu.checkpoints import dense_config, make  # noqa: PLC0415 - slow
    from tests.support.letters import write_letters  # noqa: PLC0415 - same

    config = dense_config(small=True)
    config.update({"hidden_size": HIDDEN, "initializer_range": 0.05, "dtype": "bfloat16"})
    for number in range(3):
        folder = Path(given.folder) / str(number)
        make(config, folder, number, "cpu")
        write_letters(folder, VOCAB)
    write_config(large_config(given), Path(given.folder) / "large")


def print_table(verdicts: list[Verdict]) -> None:
    """The last that is printed."""
    width = max((len(each.name) for each in verdicts), default=0)
    for each in verdicts:
        shown = {k: v for k, v in each.facts.items() if k not in ("rewards", "rounds_ms")}
        facts = "  ".join(f"{name}={value}" for name, value in shown.items())
        print(f"{each.name.ljust(width)}  {each.result:6}  {facts}")


def main() -> None:
    if sys.argv[1:2] == ["case"]:
        name, given, out = sys.argv[2:]
        run_case(name, Given(**json.loads(given)), Path(out))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a client's thread may hang in a collective
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json-out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="a,b,c")
    parser.add_argument("--layers", type=int, default=8, help="of case c's model; 36: 8 billion")
    parser.add_argument("--transport", choices=["nccl", "ipc"], default="nccl", help="of case c")
    parser.add_argument("--boot-s", type=float, default=240.0)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs/gateway"))
    options = parser.parse_args()
    options.logs = options.logs.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        bench, failure = Bench(options, Path(name)), ""
        try:
            bench.run()
        except Exception as error:  # noqa: BLE001 - what there is, is printed all the same
            failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            if failure or any(each.result != "ok" for each in bench.verdicts):
                print(bench.serving.tails())
            bench.serving.stop()
    bench.write(failure)
    for each in bench.verdicts:
        if each.detail:
            print(f"{each.name}: {each.detail}")
    if failure:
        print(f"failed: {failure}")
    print_table(bench.verdicts)
    results = [each.result for each in bench.verdicts]
    sys.exit(bool(failure) or not results or any(result != "ok" for result in results))


if __name__ == "__main__":
    main()
