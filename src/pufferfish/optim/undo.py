"""`Undo`: assignments that can be taken back."""

from collections.abc import Callable, MutableMapping
from typing import Any


class Undo:
    """Assigns, and remembers what was there.

    >>> undo, d = Undo(), {"a": 1}
    >>> undo.set(d, "a", 2)
    >>> undo.run()
    >>> d
    {'a': 1}
    """

    def __init__(self) -> None:
        self._back: list[Callable[[], None]] = []

    def run(self) -> None:
        """Take all assignments back, the last one first."""
        while self._back:
            self._back.pop()()

    def set(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set the value of a key that is there."""
        old = mapping[key]
        self._back.append(lambda: mapping.__setitem__(key, old))
        mapping[key] = value

    def setattr(self, owner: object, name: str, value: Any) -> None:
        """Set an attribute that is there."""
        old = getattr(owner, name)
        self._back.append(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    def keep(self, mapping: MutableMapping[Any, Any]) -> None:
        """Remember all items of a mapping that the caller is going to change."""
        old = dict(mapping)

        def back() -> None:
            mapping.clear()
            mapping.update(old)

        self._back.append(back)
