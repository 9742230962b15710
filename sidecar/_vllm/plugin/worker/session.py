"""A worker's update session: vLLM's own session, opened and closed for the sidecar.

vLLM's workers keep state for their session: they point their engine at the draft model while it
lasts, and drop LoRA adapters at its end. So the sidecar's session is opened and closed by methods
of the worker, which in turn call the engine. The engine never raises inside these calls: otherwise
vLLM would end the session of that one worker, while those of the other workers stay open. The
engine's error is raised after the worker's method has returned. A session is open in all workers of
an engine or in none.

If the engine is called while no call of the sidecar is running, the caller is not the sidecar.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bus.errors import wrong_state
from sidecar._vllm.plugin import agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bus.messages import Target
    from sidecar._vllm.plugin.operations import WorkerFailure


class UpdateSession:
    """Opens and closes the sidecar's update session in one vLLM worker.

    Attributes:
        open: whether the sidecar's session is open.
        ours: True while the sidecar opens or closes the session. vLLM's calls of the engine are
            then the sidecar's; all others come from another caller.
        refused: whether another caller was refused a session. vLLM knows of the refusal only in the
            one worker that raised the error (:func:`agreement.refuse`). In the other workers vLLM
            considers that session open, and the next one of the sidecar must close it first.
    """

    def __init__(self) -> None:
        self.open = False
        self.ours = False
        self.refused = False
        self._failure: WorkerFailure | None = None

    def require_open(self, worker: Any) -> None:
        """Checks that a session is open, both for the sidecar and in vLLM.

        Raises:
            EngineError: code ``wrong_state``: no session is open.
        """
        if not self.open or not _has_vllm_session(worker):
            raise wrong_state("the update session is not open")

    def begin(self, worker: Any, target: Target) -> None:
        """Opens a session for the target. A collective of the engine's workers.

        Raises:
            EngineError: code ``wrong_state``: a session is open already. After any other error,
                which is the engine's, the new session is open.
        """
        agreement.run_before_any_continues(lambda: self._require_none(worker))
        with self._by_us():
            if target == "draft":
                worker.start_draft_weight_update()
            else:
                worker.start_weight_update()

    def finish(self, worker: Any) -> None:
        """Closes the session. A collective of the engine's workers.

        Raises:
            EngineError: code ``wrong_state``: no session is open. After any other error, which is
                the engine's, the session is closed.
        """
        agreement.run_before_any_continues(lambda: self.require_open(worker))
        self.close(worker)

    def close(self, worker: Any) -> None:
        """Closes the session; it may be closed in vLLM already.

        Raises:
            EngineError: the engine's own error; the session is then closed.
        """
        if _has_vllm_session(worker):
            with self._by_us():
                worker.finish_weight_update()
        self.open = False

    def on_vllm_call(self, action: Callable[[], None], *, opens: bool) -> None:
        """Runs the engine's part of opening or closing a session, and keeps its error.

        :meth:`begin` and :meth:`close` raise the error when the worker's method has returned.

        Args:
            action: the engine's part.
            opens: True if the session is being opened, False if it is being closed.
        """
        self._failure = agreement.attempt(action)
        self.open = opens

    def _require_none(self, worker: Any) -> None:
        if self.open:
            raise wrong_state("an update session is open already")
        if self.refused and _has_vllm_session(worker):
            worker.finish_weight_update()
        self.refused = False
        if _has_vllm_session(worker):
            raise wrong_state(
                "another client has begun to update this engine, and has not finished"
            )

    @contextmanager
    def _by_us(self) -> Iterator[None]:
        self.ours, self._failure = True, None
        try:
            yield
        finally:
            self.ours = False
        if self._failure is not None:
            raise self._failure.to_error()


def _has_vllm_session(worker: Any) -> bool:
    return bool(worker._weight_update_active)  # noqa: SLF001 - there is no other way in
