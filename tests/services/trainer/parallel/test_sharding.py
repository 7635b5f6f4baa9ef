"""What the trainer asks of a transformer class, and policies that change places."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from services.trainer.parallel.blocks import checkpoint_blocks, compile_blocks
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import exchanged, shard_expert


class Block(nn.Linear):
    pass


class Plain(nn.Sequential):
    """A transformer class of somebody who does not know what diffusers' models list."""


@pytest.mark.parametrize("listed", [None, [], ["OtherBlock"]])
def test_a_transformer_must_say_what_its_blocks_are(listed: list[str] | None, ranks: Ranks) -> None:
    expert = Plain(Block(2, 2))
    expert._no_split_modules = listed  # type: ignore[assignment]
    for use in (
        lambda e: checkpoint_blocks(e, "full"),
        compile_blocks,
        lambda e: shard_expert(e, ranks, torch.float32),
    ):
        with pytest.raises(ValueError, match="Plain cannot be split into blocks: set its class attribute"):
            use(expert)
    expert._no_split_modules = ["Block"]  # type: ignore[assignment]
    checkpoint_blocks(expert, "full")


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(5, generator=generator).to(dtype) for name in ("a", "b", "c")}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_trained_and_another_policy_change_places_and_back(dtype: torch.dtype) -> None:
    trained, others = tensors(1), tensors(2, dtype)
    with contextlib.suppress(ArithmeticError), exchanged(trained, others):
        assert same(trained, {name: tensor.float() for name, tensor in tensors(2, dtype).items()})
        if dtype == torch.float32:  # no second copy is kept
            assert same(others, tensors(1))
        raise ArithmeticError
    assert same(trained, tensors(1))
    assert same(others, tensors(2, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_switch_that_fails_half_way_is_undone(dtype: torch.dtype) -> None:
    trained, others = tensors(1), tensors(2, dtype)
    others["b"] = torch.zeros(4, dtype=dtype)
    with pytest.raises(RuntimeError), exchanged(trained, others):
        raise AssertionError("the shapes of b differ")
    assert same(trained, tensors(1))
    assert same(others, tensors(2, dtype) | {"b": torch.zeros(4, dtype=dtype)})
