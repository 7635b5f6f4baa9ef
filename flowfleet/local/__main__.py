"""The supervisor as a process of its own: `python -m flowfleet.local OPTIONS_JSON [--exit-with-stdin]`.

Its stderr is the starter's pipe until the stack is ready or cannot be; then the log file takes its place.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TextIO

from flowfleet.local.plan import StackOptions
from flowfleet.local.session import run_stack, stop_on_signals
from flowfleet.local.stack import Stack, StackError, StateDir
from flowfleet.process.telemetry import JsonFormatter


def main(arguments: list[str]) -> int:
    options = StackOptions.model_validate_json(arguments[0])
    stop = threading.Event()
    stop_on_signals(stop)
    if "--exit-with-stdin" in arguments[1:]:
        threading.Thread(target=_stop_with_stdin, args=(stop,), daemon=True).start()
    try:
        log_file = _log_to(StateDir(options.state_dir))

        def leave_starter(_: Stack) -> None:
            os.dup2(log_file.fileno(), sys.stderr.fileno())

        run_stack(options, stop, leave_starter)
    except (StackError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _log_to(state: StateDir) -> TextIO:
    state.make()
    file = state.log("supervisor").open("a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(JsonFormatter("supervisor"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every health check
    return file


def _stop_with_stdin(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):  # unbuffered: the lock of a buffer would keep the interpreter from ending
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
