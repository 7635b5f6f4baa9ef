import contextlib
import socket
from pathlib import Path

import pytest

from flowfleet.local.plan import StackOptions
from flowfleet.local.session import local_stack
from flowfleet.local.stack import StackError


def test_a_stack_that_cannot_start_says_why_and_nothing_else(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with pytest.raises(StackError) as failed:
            stack.enter_context(local_stack(StackOptions(state_dir=tmp_path, port=taken)))
    assert str(failed.value) == f"port {taken} is taken; give another --port (0 takes a free one)"
