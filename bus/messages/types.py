"""Bounded types that messages are made of: names, texts, counts, choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 4
# Bounds. A frame over MAX_FRAME_BYTES is refused unread; 16 MiB hold the manifest
# of a model of 100,000 tensors with names of 100 characters.
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_TENSORS: Final = 200_000
MAX_BLOB_BYTES: Final = 4 * 1024 * 1024
MAX_MEETING_BYTES: Final = 4096
Count: TypeAlias = Annotated[int, Meta(ge=0)]
# What somebody adds one to; so it never comes to what the wire has no number for.
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
# Ranks of a DP group, workers of an engine.
Size: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")
]
ShortText: TypeAlias = Annotated[str, Meta(max_length=256)]
# DP groups that something is for; empty: all of the group.
Scope: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=16_384)]
LongText: TypeAlias = Annotated[str, Meta(max_length=4096)]
# What an engine can do, by name, each with the reason why it is off; empty text: it works.
Features: TypeAlias = Annotated[dict[ShortText, ShortText], Meta(max_length=64)]
# How updates treat an engine's KV connectors, by name (docs/vllm.md); where they can't be made, the
# text begins with REFUSED.
KvConnectors: TypeAlias = Annotated[dict[ShortText, ShortText], Meta(max_length=64)]
REFUSED: Final = "refused: "
UpdateId: TypeAlias = Annotated[str, Meta(max_length=64)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
TensorName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
TensorNames: TypeAlias = Annotated[tuple[TensorName, ...], Meta(max_length=MAX_TENSORS)]
Dtypes: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(max_length=32)], ...], Meta(max_length=MAX_TENSORS)
]
Shape: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=16)]
Shapes: TypeAlias = Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)]
Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSORS)]
MAX_REQUEST_IDS: Final = 4096
# Of a canary. The answers of so many engines, each of MAX_PROBES probes, fit in one frame.
MAX_PROBES: Final = 16
MAX_PROBE_TOKENS: Final = 64
MAX_PROMPT_TOKENS: Final = 4096
MAX_PROBED: Final = 1024
Prompt: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Prompts: TypeAlias = Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_PROBES)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PROBE_TOKENS)]
RequestIds: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=MAX_REQUEST_IDS)]
# A follower is another rank of the trainer; who boots is a sidecar whose engine does.
Role: TypeAlias = Literal[
    "trainer", "follower", "engine", "booting", "coordinator", "observer", "scheduler"
]
# What rank 0 tells its followers: gather the tensors with me; it is over.
TrainerPoint: TypeAlias = Literal["go", "end"]
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
# 1: weights wait in the host's memory; 2: they are gone.
SleepLevel: TypeAlias = Literal[1, 2]
# What a `wait` pause becomes at its deadline.
Escalation: TypeAlias = Literal["keep", "abort"]
# How a rank stands whose peer ranks ask it; see bus.protocol.engine.lease.
LeasePosition: TypeAlias = Literal["held", "pausing", "clean", "partial", "running"]
# Which of an engine's models an update is for: the one that it serves, or the draft model of its
# speculative decoding.
Target: TypeAlias = Literal["model", "draft"]
# What an engine's core does, by its status page; empty: it has none.
CorePhase: TypeAlias = Literal["", "idle", "work", "step", "dummy", "sync", "barrier"]
# What becomes of an engine's requests while a canary runs: they must have been ended, or stay as
# they are; empty: there is none, or the engine can't run it.
CanaryMode: TypeAlias = Literal["", "abort", "keep"]
# What an engine of a disaggregated pair does; empty: both.
PdRole: TypeAlias = Literal["", "prefill", "decode"]
# How a chunk is checked before it is loaded: `unsupported` where a backend can't.
Verify: TypeAlias = Literal["off", "sample", "full", "unsupported"]
# What an engine says of itself, in its heartbeats and when it joins. One that is emptied sleeps,
# and its weights are gone. One that is staging serves, while the next weights come.
Phase: TypeAlias = Literal[
    "running",
    "staging",
    "pause_unknown",
    "pausing",
    "paused",
    "asleep",
    "weights_discarded",
    "resuming",
    "armed",
    "updating",
    "quarantined",
]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What requests an engine takes; 0 where it does not report it.

    ``vocab_size``: token ids are below it; ``max_model_len``: tokens of prompt and output together;
    ``slots``: sequences that run at once;
    ``exact_seeds``: draws are keyed by position, so that a request with a seed that is asked anew,
    with its tokens so far as part of the prompt, goes on as if nothing had been.
    """

    vocab_size: Count = 0
    max_model_len: Count = 0
    slots: Count = 0
    exact_seeds: bool = False


NO_LIMITS: Final = RequestLimits()
