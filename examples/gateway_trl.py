"""TRL's own clients train a group of engines through one URL, as if it were one vLLM.

Two real vLLM engines serve, on the CPU, behind `wavebus gateway`. TRL's clients use it as they are:
that of GRPO, which sends without a pause, and those of AsyncGRPO, which pause first. A run of TRL
needs `vllm_server_base_url="http://127.0.0.1:8000"` alone.
Run it; it needs vLLM, TRL (pip install 'wavebus[demo,trl]' typing_extensions) and no GPU:

python examples/gateway_trl.py

On CPUs there is no NCCL: a stand-in over gloo takes its place (tests/support/nccl_pair.py), in the
engines and here. All else is vLLM's, TRL's and wavebus's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lab.demo.policy import Policy, make_policy, save_checkpoint
from lab.network import PolicyConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the engines' part, and tests
from examples.gateway_skyrl import PROMPTS, free_port, greedy, group

if TYPE_CHECKING:
    from collections.abc import Iterator

UPDATES = 2  # with each client
CALLERS = 3
LONG = 160  # tokens of an answer that is asked for while weights change
SHORT = 12  # tokens of one that is compared with the model


class Rollouts:
    """Asks for long answers all the time, with clients of GRPO's, each in its own thread.

    Args:
        url: the gateway's.
    """

    def __init__(self, url: str) -> None:
        self.spans: list[tuple[float, float]] = []  # when each call began and ended
        self._url = url
        self._ends = threading.Event()
        self._warm = threading.Barrier(CALLERS + 1)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs them during a block. An error of theirs is raised at its end."""
        with ThreadPoolExecutor(CALLERS) as pool:
            callers = [pool.submit(self._call) for _ in range(CALLERS)]
            try:
                self._warm.wait()
                yield
            finally:
                self._ends.set()
            for each in callers:
                each.result()

    def in_flight_at(self, moment_s: float) -> int:
        """Returns how many calls had begun, and ended later."""
        return sum(began < moment_s < ended for began, ended in self.spans)

    def _call(self) -> None:
        try:
            client = grpo_client(self._url)
            complete(client, LONG)
        except BaseException:
            self._warm.abort()
            raise
        self._warm.wait()
        while not self._ends.is_set():
            began = time.monotonic()
            complete(client, LONG)
            self.spans.append((began, time.monotonic()))


def grpo_client(url: str) -> Any:
    from trl.generation.vllm_client import VLLMClient  # noqa: PLC0415 - after the stand-in

    return VLLMClient(base_url=url, group_port=free_port(), connection_timeout=60.0)


def complete(client: Any, length: int) -> list[list[int]]:
    """Returns greedy tokens for each prompt.

    Raises:
        RuntimeError: an answer is missing, or shorter.
    """
    options = {"ignore_eos": True}
    answer = client.generate(
        PROMPTS, temperature=0.0, max_tokens=length, logprobs=0, generation_kwargs=options
    )
    done: list[list[int]] = answer["completion_ids"]
    if [len(each) for each in done] != [length] * len(PROMPTS):
        raise RuntimeError(f"answers have {[len(each) for each in done]} tokens, not {length}")
    return done


def improve(model: Policy) -> None:
    with torch.no_grad():  # "training"
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)


def described(model: Policy) -> list[tuple[str, str, list[int]]]:
    """Names, dtypes and shapes, as TRL describes them."""
    return [
        (name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in model.named_parameters()
    ]


def tensors(model: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, each.detach()) for name, each in model.named_parameters())


class Training:
    """Updates the group, and looks after each update at what it serves.

    Args:
        url: the gateway's.
        model: what is trained.
    """

    def __init__(self, url: str, model: Policy) -> None:
        self.began: list[float] = []
        self._url = url
        self._model = model
        self._client = grpo_client(url)
        self._seen = self._check([])

    def with_grpo(self) -> None:
        """GRPO's client: each update without a pause."""
        self._client.init_communicator(device="cuda")
        for _ in range(UPDATES):
            improve(self._model)
            with self._measured("GRPO's client"):
                self._client.update_named_params(described(self._model), tensors(self._model))
                self._client.reset_prefix_cache()
        self._client.close_communicator()

    def with_async_grpo(self) -> None:
        """AsyncGRPO's clients: each update in a pause."""
        from trl.experimental.async_grpo.vllm_client import VLLMClient  # noqa: PLC0415
        from trl.experimental.async_grpo.weight_transfer import (  # noqa: PLC0415
            WeightTransferClient,
        )

        names, dtypes, shapes = zip(*described(self._model), strict=True)
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}
        transfer = WeightTransferClient(VLLMClient(self._url), info, weight_sync_timeout=120)
        transfer.init_weight_transfer()
        for _ in range(UPDATES):
            improve(self._model)
            with self._measured("AsyncGRPO's clients"):
                transfer.pause()
                transfer.send_weights(tensors(self._model))
                transfer.resume()
        transfer.destroy()

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        took_ms = (time.monotonic() - began) * 1000
        self.began.append(began)
        self._seen = self._check(self._seen)
        print(f"{name}: update in {took_ms:.0f} ms; all answers are those of the new weights")

    def _check(self, before: list[list[int]]) -> list[list[int]]:
        expected = [greedy(self._model, each) for each in PROMPTS]
        # The gateway chooses the engine: several calls reach both.
        for _ in range(4):
            if (found := complete(self._client, SHORT)) != expected:
                sys.exit(f"an engine serves other weights: {found}, not {expected}")
        if expected == before:
            sys.exit("the update changed no answer, so it shows nothing")
        return expected


def train(url: str, model: Policy) -> None:
    training, rollouts = Training(url, model), Rollouts(url)
    with rollouts.running():
        training.with_grpo()
        training.with_async_grpo()
    across = [rollouts.in_flight_at(moment_s) for moment_s in training.began]
    print(f"in flight as updates began: {across}; {len(rollouts.spans)} calls got whole answers")
    if not all(across):
        sys.exit("an update began while no call was in flight")


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)  # the engines need the other processors
    torch.manual_seed(0)
    model = make_policy(PolicyConfig())
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        save_checkpoint(model, folder / "model")
        url = group(stack, folder)
        import accelerate  # type: ignore[import-untyped]  # noqa: PLC0415 - with vLLM alone

        from tests.support import nccl_pair  # noqa: F401, PLC0415 - gloo instead of NCCL

        accelerate.PartialState(cpu=True)  # TRL's log needs it
        train(url, model)


if __name__ == "__main__":
    main()
