"""Messages about waves of DP groups, between the broker and their DP coordinators."""

from __future__ import annotations

from bus.messages.types import Count, Message, Name, Serial, ShortText


class FirstReq(Message, frozen=True):
    """DP coordinator to broker: rank ``rank`` of an idle DP group has received a request.

    ``wave`` is the wave to start. Sent only where front ends wake their group (vLLM 0.32, the
    embedded engine). Where engines start waves themselves (vLLM 0.33), WAVE_STARTED names the rank.
    """

    dp_group: Name
    rank: Count
    wave: Serial


class FirstReqHeld(Message, frozen=True):
    """Broker to DP coordinator: the wave waits until the DP group may run.

    ``reason`` says why it may not run now.
    """

    dp_group: Name
    wave: Count
    reason: ShortText


class StartDpWave(Message, frozen=True):
    """Broker to DP coordinator: every rank but ``excluded`` joins the wave.

    Ranks without requests run dummy batches until all ranks are idle.

    Attributes:
        dp_group: the DP group.
        wave: the number of the wave.
        excluded: the number of a rank that does not join; None: all ranks join.
    """

    dp_group: Name
    wave: Count
    excluded: Count | None


class WaveStarted(Message, frozen=True):
    """DP coordinator to broker: a wave runs. The broker does not answer.

    Attributes:
        dp_group: the DP group.
        wave: the number of the wave.
        local: the coordinator started the wave alone: the broker had not answered FIRST_REQ.
        rank: the rank that began the wave with its first request. Rank 0 also reports a wave that
            begins with a resume. None: unknown.
    """

    dp_group: Name
    wave: Serial
    local: bool
    rank: Count | None = None


class WaveComplete(Message, frozen=True):
    """DP coordinator to broker: every rank is idle. The next wave is ``wave + 1``."""

    dp_group: Name
    wave: Serial
