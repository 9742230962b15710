"""Bounded types that messages are made of: names, texts, counts, choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

from msgspec import Meta

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 6
# A larger frame is refused unread. 16 MiB hold the manifest of 100,000 tensors with names of 100
# characters.
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_TENSORS: Final = 200_000
MAX_BLOB_BYTES: Final = 4 * 1024 * 1024
MAX_MEETING_BYTES: Final = 4096
Count: TypeAlias = Annotated[int, Meta(ge=0)]
# A number that the receiver adds to; the bound keeps the result within what the wire can carry.
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
# Ranks of a DP group, workers of an engine.
Size: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")
]
ShortText: TypeAlias = Annotated[str, Meta(max_length=256)]
# The DP groups that a message is for; empty: all of the group.
Scope: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=16_384)]
LongText: TypeAlias = Annotated[str, Meta(max_length=4096)]
# An engine's features by name, each with the reason why it is off; empty: it works.
Features: TypeAlias = Annotated[dict[ShortText, ShortText], Meta(max_length=64)]
# How updates treat an engine's KV connectors, by name (docs/vllm.md). If an update is impossible,
# the text begins with REFUSED.
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
# Bounds of a canary. MAX_PROBED engines' answers to MAX_PROBES probes fit in one frame.
MAX_PROBES: Final = 16
MAX_PROBE_TOKENS: Final = 64
MAX_PROMPT_TOKENS: Final = 4096
MAX_PROBED: Final = 1024
Prompt: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Prompts: TypeAlias = Annotated[tuple[Prompt, ...], Meta(min_length=1, max_length=MAX_PROBES)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PROBE_TOKENS)]
RequestIds: TypeAlias = Annotated[tuple[ShortText, ...], Meta(max_length=MAX_REQUEST_IDS)]
# A follower is a rank of the trainer other than 0; `booting` is a sidecar whose engine boots.
Role: TypeAlias = Literal[
    "trainer", "follower", "engine", "booting", "coordinator", "observer", "scheduler"
]
# Rank 0 of a trainer announces: "go": gather the tensors with rank 0; "end": the update is over.
TrainerPoint: TypeAlias = Literal["go", "end"]
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
# 1: the host's memory keeps the weights; 2: they are discarded.
SleepLevel: TypeAlias = Literal[1, 2]
# The mode that a `wait` pause changes to at its deadline.
Escalation: TypeAlias = Literal["keep", "abort"]
# A rank's position in a lease vote; see bus._protocol.engine.lease.
LeasePosition: TypeAlias = Literal["held", "pausing", "clean", "partial", "running"]
# The model that an update is for: the served model, or the draft model of speculative decoding.
Target: TypeAlias = Literal["model", "draft"]
# What an engine core does, by its status page; empty: no page.
CorePhase: TypeAlias = Literal["", "idle", "work", "step", "dummy", "sync", "barrier"]
# How a pause with a canary treats requests: it ends them, or keeps them. Empty: no canary.
CanaryMode: TypeAlias = Literal["", "abort", "keep"]
# The role of an engine in a disaggregated group; empty: it prefills and decodes.
PdRole: TypeAlias = Literal["", "prefill", "decode"]
# How a chunk is verified before its load; `unsupported`: the backend can't.
Verify: TypeAlias = Literal["off", "sample", "full", "unsupported"]
# An engine's state in its JOIN and heartbeats. `weights_discarded`: it sleeps without weights.
# `staging`: it serves while the next weights arrive.
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


class Message:
    """Base of every message. :mod:`bus.messages.registry` lists them."""

    __slots__ = ()
    if TYPE_CHECKING:
        __match_args__: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine's requests; 0 where the engine does not report one.

    Attributes:
        vocab_size: token ids are below this.
        max_model_len: the most tokens of prompt and output together.
        slots: how many sequences run at once.
        exact_seeds: sampling is keyed by seed and position. So a request with a seed continues
            exactly if it is sent again with its output so far appended to the prompt.
    """

    vocab_size: Count = 0
    max_model_len: Count = 0
    slots: Count = 0
    exact_seeds: bool = False


NO_LIMITS: Final = RequestLimits()
