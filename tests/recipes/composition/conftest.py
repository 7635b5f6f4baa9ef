import pytest
import torch

from recipes.composition.scenes import Scenes, World, draw
from tests.recipes.composition.shapes import shapes


@pytest.fixture(scope="package")
def world() -> World:
    return World.small(shapes())


@pytest.fixture(scope="package")
def scenes(world: World) -> Scenes:
    return draw(world, 600, torch.Generator().manual_seed(5))
