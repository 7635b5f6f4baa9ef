"""What the meta device says of memory, against real tensors and hand counts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.planning.activations import measure
from flowfleet.planning.compiled import compiled_bytes
from flowfleet.planning.live import LiveBytes
from flowfleet.planning.skeleton import META, blank_prompts, load_skeleton, shortened
from tests.tiny_models import MAKERS, make_tiny

ROWS, TOKENS = 2, 12


def saved_by_real_tensors(path: Path, size: Size) -> int:
    """Bytes that autograd keeps of a real forward on the CPU, every storage once, parameters left out."""
    adapter = adapter_for(path).load(path, dtype=torch.float32)
    expert = next(iter(adapter.experts.values())).requires_grad_(True)
    own = {parameter.untyped_storage().data_ptr() for parameter in expert.parameters()}
    found: dict[int, int] = {}
    held = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor

    latents, prompts = torch.zeros(ROWS, *adapter.latent_shape(size)), blank_prompts(adapter, ROWS, TOKENS, size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity = adapter.velocity(latents, torch.tensor(1000.0), prompts, size=size)
    assert velocity.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_every_family_keeps_on_the_meta_device_what_it_keeps_on_a_real_one(kind: str, tmp_path: Path) -> None:
    path = make_tiny(kind, tmp_path / kind)
    size = Size(64, 64, 9 if kind.startswith(("wan", "hunyuan_video", "ltx")) else 1)
    skeleton = load_skeleton(path, torch.float32)
    expert = next(iter(skeleton.experts.values())).requires_grad_(True)
    latents, prompts = (
        torch.empty(ROWS, *skeleton.latent_shape(size), device=META),
        blank_prompts(skeleton, ROWS, TOKENS, size),
    )

    with shortened(expert) as stands_for:
        found = measure(
            lambda: skeleton.velocity(latents, torch.tensor(1000.0), prompts, size=size),
            expert,
            stands_for,
            ROWS,
            compiled=False,
        )

    assert found.peak("none", ROWS) - found.working == pytest.approx(saved_by_real_tensors(path, size), rel=0.05)
    assert found.peak("full", ROWS) < found.peak("none", ROWS)
    assert found.peak("none", 2 * ROWS) == 2 * found.peak("none", ROWS)
    assert found.peak("none", ROWS, passes=2) + found.working == 2 * found.peak("none", ROWS)


def test_live_bytes_are_those_of_tensors_that_are_still_there() -> None:
    given = torch.empty(1000, device=META)  # 4,000 bytes, not counted
    with LiveBytes() as live:
        first = given + 1
        second = first.view(10, 100) * 2
        del first
        third = second.sin().cos()
        del second
        third.add_(1)

    assert (live.now, live.peak) == (4000, 12000)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, device=META)

    def forward(self, x: Tensor) -> Tensor:
        wave: Tensor = self.linear(x).sin().sin().sin()
        return wave


def test_a_compiled_block_keeps_the_product_and_computes_what_is_point_wise_again() -> None:
    x = torch.empty(32, 64, device=META, requires_grad=True)

    assert compiled_bytes(Waves(), (x,), {}) == 32 * 64 * 4  # eager keeps the inputs of three sines
