"""Weight transfer backends by name, as each side keeps them: senders here, receivers there.

A user's own backend is one class and one registration on each side. Whoever makes the
processes registers in code; processes that wavebus or vLLM start find what an installed
package offers as an entry point::

    [project.entry-points."wavebus.senders"]
    pigeons = "my_package.pigeons:PigeonSender"
    [project.entry-points."wavebus.receivers"]
    pigeons = "my_package.pigeons:PigeonReceiver"
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from bus.errors import UsageError
from bus.ids import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


class Backends(Generic[T]):
    """What makes one end of each backend.

    Args:
        group: entry points of this group are looked up, when a name is first asked for.
        built_in: those that come with wavebus; no other may take their names.
        lacking: for those of them that not every machine can have, why this one can't; an empty
            text, where it can. Asked anew each time.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, Callable[[], T]],
        lacking: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._group = group
        self._built_in = dict(built_in)
        self._lacking = dict(lacking or {})
        self._registered: dict[str, Callable[[], T]] = {}

    def register(self, name: str, factory: Callable[[], T]) -> None:
        """Take ``factory`` (a class will do) as the backend ``name``, in place of an earlier one.

        Raises:
            UsageError: the name is one of wavebus's own, or can't be one.
        """
        check_name(name, "backend")
        if name in self._built_in:
            raise UsageError(f"backend={name!r} is wavebus's own; choose another name")
        self._registered[name] = factory

    def names(self) -> tuple[str, ...]:
        """All there are: built in (what this machine can have), registered, installed."""
        built_in = (name for name in self._built_in if not self._lack(name))
        installed = (point.name for point in entry_points(group=self._group))
        return tuple(dict.fromkeys((*built_in, *self._registered, *sorted(installed))))

    def find(self, name: str) -> Callable[[], T] | None:
        """What makes ``name``; None if nobody offers it.

        Raises:
            UsageError: this machine can't have it; or an installed package offers it, and can't
                be imported.
        """
        lack = self._lack(name)
        if lack:
            raise UsageError(f"backend={name!r}: {lack}")
        found = self._built_in.get(name) or self._registered.get(name)
        if found is not None:
            return found
        for point in entry_points(group=self._group, name=name):
            try:
                loaded: Callable[[], T] = point.load()
            except Exception as error:
                raise UsageError(
                    f"backend={name!r}: {point.value}, an entry point of {self._group}, "
                    f"can't be loaded: {type(error).__name__}: {error}"
                ) from error
            return loaded
        return None

    def _lack(self, name: str) -> str:
        why = self._lacking.get(name)
        return why() if why is not None else ""
