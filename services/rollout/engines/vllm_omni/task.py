"""Function for the engine's thread to run, and its result.

vLLM-Omni turns a worker's exception into text and deep-copies a request's parameters. A task passes through both
unchanged and keeps the exception, so the caller gets the very result or error. This works because the worker is a
thread of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Task(Generic[T]):
    """A function of the worker extension or the pipeline, to be run once by it."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._value: T | None = None
        self._error: BaseException | None = None
        self.is_done = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Task[T]:
        return self

    def run(self, target: Any, *, passing: tuple[type[BaseException], ...] = ()) -> None:
        """Calls the function. Keeps its exceptions for the caller, except `passing`, which the engine must see."""
        try:
            self._value = self._function(target)
        except passing:
            raise
        except BaseException as error:
            self._error = error
        self.is_done = True

    def result(self) -> T:
        """Returns the function's result. Raises the function's exception, or RuntimeError if it has not run."""
        if self._error is not None:
            raise self._error
        if not self.is_done:
            raise RuntimeError("the engine abandoned a task")
        return cast(T, self._value)
