"""The Triton kernel, interpreted on the CPU, against torch's own operations."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import torch
from flowfleet.weights import hashing, hashing_triton

generator = torch.Generator().manual_seed(1)
tensors = [
    (100 * torch.randn(size, generator=generator)).to(dtype)
    for size in (0, 1, 2, 3, 5, 7, 8, 1000, 4099, 70_001)
    for dtype in (torch.float32, torch.bfloat16)
]
tensors += [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in (1, 7, 9, 70_001)]
tensors += [tensors[-5][1:], tensors[-5][8:519], tensors[-5][: 300 * 7].view(300, 7)]
assert torch.equal(hashing_triton.content_sums(tensors), hashing.content_sums(tensors))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: install a CUDA build of torch")
def test_the_kernel_gives_the_values_of_torch() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, timeout=300)
