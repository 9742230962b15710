"""Runs the canary's probes on a paused engine, and leaves its requests as they are.

All probes run in one call of the core's thread, so no request gets a token meanwhile. The cache is
restored afterwards, so a request that the pause keeps can continue with its keys and values. Ranks
in lockstep make equally many steps without a wave, because they run the same probes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bus.errors import EngineError
from bus.messages import NackCode, ProbeResult
from sidecar._embedded.requests import Delta, GenerationRequest
from sidecar._embedded.sampling import SamplingParams
from sidecar._embedded.scheduler import BatchScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sidecar._embedded.model import ModelRunner


def probe_requests(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, *, max_len: int, vocab_size: int
) -> list[GenerationRequest]:
    """Makes the canary's probes: greedy requests that ignore end-of-sequence tokens.

    Args:
        max_len: how many tokens prompt and output may have together.

    Raises:
        EngineError: a prompt has a token that the model lacks, or is too long.
    """
    for number, prompt in enumerate(prompts):
        if max(prompt) >= vocab_size or len(prompt) + max_tokens > max_len:
            raise EngineError(
                f"probe {number} has {len(prompt)} tokens with ids up to {max(prompt)}, and "
                f"generates {max_tokens} more; the model has a vocabulary of {vocab_size} and "
                f"{max_len} positions",
                code=NackCode.MALFORMED,
            )
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, seed=0
    )
    return [
        GenerationRequest(f"probe-{number}", prompt, params, 0, max_tokens, (), stream=False)
        for number, prompt in enumerate(prompts)
    ]


def run_probes(
    model: ModelRunner,
    requests: Sequence[GenerationRequest],
    *,
    slots: int,
    version: int,
    in_use: bool,
    stepping: Callable[[], None],
) -> tuple[ProbeResult, ...]:
    """Runs probes to their end in a paused core's thread, and returns their results.

    Args:
        slots: how many sequences may run at once.
        in_use: whether requests need the cache's content after the resume. If so, it is copied and
            restored.
        stepping: called before each step, for the status page.
    """
    ended: dict[str, Delta] = {}
    probes = BatchScheduler(
        model,
        slots=slots,
        publish=lambda deltas: ended.update({delta.request_id: delta for delta in deltas}),
    )
    for request in requests:
        probes.add(request)
    with _cache_given_back(model, in_use=in_use):
        while probes.running or probes.waiting:
            stepping()
            probes.step(admit=True, version=version)
    return tuple(
        ProbeResult(ended[request.id].token_ids, ended[request.id].logprobs or ())
        for request in requests
    )


@contextlib.contextmanager
def _cache_given_back(model: ModelRunner, *, in_use: bool) -> Iterator[None]:
    kept = (model.kv.keys.clone(), model.kv.values.clone()) if in_use else None
    model.kv.clear()
    yield
    model.kv.clear()
    if kept is not None:
        model.kv.restore(*kept)
