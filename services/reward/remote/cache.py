"""Answers that were given before. Equal questions about equal pictures come when a step is scored again, when a reward
is used twice, and when a policy has collapsed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The `size` values used last; 0 keeps none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def pop(self, key: bytes) -> Value | None:
        """The value, which is kept no longer."""
        return self._values.pop(key, None)

    def put(self, key: bytes, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)
