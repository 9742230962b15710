"""A worker's update session: vLLM's own, opened and closed for the sidecar.

vLLM's workers keep book of their session: they point their engine at the draft model for its
length, and drop LoRA adapters at its end. So the worker's own calls open and close it. They call
the engine in turn, which never raises there: vLLM would end the session of that one worker, while
those of its peer ranks stay open. The engine's error is raised when the worker's call has returned,
and the session is open in all workers of an engine or in none.

A call of the engine that comes while no call of the sidecar is under way is another caller's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bus.errors import EngineError
from bus.messages import NackCode
from sidecar.vllm.plugin import agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus.messages import Target
    from sidecar.vllm.plugin.operations import WorkerFailure


class UpdateSession:
    """Keeps whether an update session is open, and whose call is under way.

    Attributes:
        open: the sidecar's session is open.
        ours: a call of the sidecar is under way that opens or closes it.
        refused: another caller was refused a session. vLLM knows of the refusal only in the one
            worker that raised it (:func:`agreement.refuse`); in the others the session is open, for
            vLLM.
    """

    def __init__(self) -> None:
        self.open = False
        self.ours = False
        self.refused = False
        self._failure: WorkerFailure | None = None

    def require_open(self, worker: Any) -> None:
        """Check that a session is open.

        Raises:
            EngineError: code ``wrong_state``, if none is open.
        """
        if not self.open or not _has_vllm_session(worker):
            raise EngineError("the update session is not open", code=NackCode.WRONG_STATE)

    def begin(self, worker: Any, target: Target) -> None:
        """Open a session of the target. A collective of the engine's workers.

        Raises:
            EngineError: code ``wrong_state``, if one is open; or what the engine failed with, and
                then one is open.
        """
        agreement.run_before_any_continues(lambda: self._require_none(worker))
        with self._by_us():
            if target == "draft":
                worker.start_draft_weight_update()
            else:
                worker.start_weight_update()

    def finish(self, worker: Any) -> None:
        """Close the session. A collective of the engine's workers.

        Raises:
            EngineError: code ``wrong_state``, if none is open; or what the engine failed with, and
                then none is open.
        """
        agreement.run_before_any_continues(lambda: self.require_open(worker))
        self.close(worker)

    def close(self, worker: Any) -> None:
        """Close the session, also if another caller has closed it for vLLM.

        Raises:
            EngineError: what the engine failed with; none is open then.
        """
        if _has_vllm_session(worker):
            with self._by_us():
                worker.finish_weight_update()
        self.open = False

    def on_vllm_call(self, action: Callable[[], None], *, opens: bool) -> None:
        """Run the engine's part when the worker opens or closes a session."""
        self._failure = agreement.attempt(action)
        self.open = opens

    def _require_none(self, worker: Any) -> None:
        if self.open:
            raise EngineError("the update session is open", code=NackCode.WRONG_STATE)
        if self.refused and _has_vllm_session(worker):
            worker.finish_weight_update()
        self.refused = False
        if _has_vllm_session(worker):
            raise EngineError(
                "somebody else has begun to update this engine, and has not finished",
                code=NackCode.WRONG_STATE,
            )

    @contextmanager
    def _by_us(self) -> Iterator[None]:
        self.ours, self._failure = True, None
        try:
            yield
        finally:
            self.ours = False
        agreement.raise_failure(self._failure)


def _has_vllm_session(worker: Any) -> bool:
    return bool(worker._weight_update_active)  # noqa: SLF001 - there is no other way in
