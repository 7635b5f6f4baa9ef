"""A fall back to eager is logged."""

import subprocess
import sys

BROKEN = """
import torch
from flowfleet.hardware import compiling

def forward(x):
    torch._dynamo.graph_break()
    return x + 1

compiling.prepare()
assert torch._dynamo.config.recompile_limit >= compiling.MOST_KINDS
torch.compile(forward, backend="eager")(torch.zeros(1))
"""


def test_a_break_in_a_graph_is_logged() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Graph break" in ended.stderr
    assert "torch._dynamo.graph_break()" in ended.stderr
