from __future__ import annotations

import json
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.data.trajectories import EmbedsBlob, FinalLatents, Trajectory
from flowfleet.errors import DataLoss
from flowfleet.models.embeds import PromptEmbeds

VALUES = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1.0, -3.25, 3.4e38])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32 numbers, the odd ones among them."""
    picks = torch.randint(len(VALUES), shape, generator=torch.Generator().manual_seed(seed))
    return VALUES[picks]


def trajectory(steps: list[int], latent: tuple[int, ...], chain: bool, seed: int = 0) -> Trajectory:
    num = len(steps)
    x = values((num + 1, *latent), seed)
    return Trajectory(
        latents=x[:-1],
        next_latents=x[1:] if chain else values((num, *latent), seed + 1),
        log_probs=values((num,), seed + 2),
        sigmas=values((num,), seed + 3),
        sigmas_next=values((num,), seed + 4),
        timesteps=values((num,), seed + 5),
        step_indices=torch.tensor(steps, dtype=torch.int64),
    )


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True).map(sorted),
    latent=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    chain=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_trajectories_come_back_bit_for_bit(steps: list[int], latent: tuple[int, ...], chain: bool, seed: int) -> None:
    original = trajectory(steps, latent, chain, seed)
    read = Trajectory.from_bytes(original.to_bytes())
    for name in vars(original):
        before, after = getattr(original, name), getattr(read, name)
        assert (before.shape, before.dtype, bits(before)) == (after.shape, after.dtype, bits(after)), name
    for k in range(len(steps)):
        x, x_next = read.pair(k)
        assert (bits(x), bits(x_next)) == (bits(original.latents[k]), bits(original.next_latents[k]))


def test_a_chain_stores_one_more_latent_than_steps_and_pairs_store_two_each() -> None:
    element_bytes, latent = 4, (256, 16)

    def latents_stored(chain: bool) -> int:
        tensors = safetensors.torch.load(trajectory([1, 2, 3], latent, chain).to_bytes())
        return sum(t.numel() * element_bytes for t in tensors.values() if t.dim() > 1) // (256 * 16 * element_bytes)

    assert (latents_stored(True), latents_stored(False)) == (4, 6)


def test_zero_and_minus_zero_do_not_make_a_chain() -> None:
    zeros = torch.zeros(2, 3)
    given_ = trajectory([0, 1], (3,), chain=True)
    traj = Trajectory(**{**vars(given_), "latents": zeros, "next_latents": -zeros})
    assert torch.signbit(Trajectory.from_bytes(traj.to_bytes()).next_latents).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": torch.zeros(3, 4, dtype=torch.bfloat16)}, "latents must be torch.float32"),
        ({"latents": torch.zeros(2, 4)}, "latents must be"),
        ({"next_latents": torch.zeros(3, 5)}, "next_latents must be"),
        ({"log_probs": torch.zeros(4)}, "log_probs must be"),
        ({"sigmas": torch.zeros(3, dtype=torch.float64)}, "sigmas must be"),
        ({"sigmas_next": torch.zeros(3, 1)}, "sigmas_next must be"),
        ({"timesteps": torch.zeros(0)}, "timesteps must be"),
        ({"step_indices": torch.tensor([1, 1, 2])}, "must ascend"),
        ({"step_indices": torch.tensor([-1, 1, 2])}, "must ascend"),
        ({"step_indices": torch.tensor([1, 2, 3], dtype=torch.int32)}, "step_indices must be torch.int64"),
        ({"step_indices": torch.tensor(3)}, "step_indices must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    good = vars(trajectory([1, 2, 3], (4,), chain=False))
    with pytest.raises(ValueError, match=message):
        Trajectory(**{**good, **change})
    data = safetensors.torch.save({**good, **change}, metadata={"format": "flowfleet.trajectory.v1"})
    with pytest.raises(DataLoss, match=message):
        Trajectory.from_bytes(data)


def test_a_header_that_no_parser_can_follow_is_refused() -> None:
    header = b'{"a":' + b"[" * 100_000
    for size_bytes in (len(header), 2**62):
        with pytest.raises(DataLoss, match="not a safetensors blob with a format"):
            Trajectory.from_bytes(size_bytes.to_bytes(8, "little") + header)


def test_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        trajectory([], (4,), chain=True)


@pytest.mark.parametrize("missing", ["latents", "log_probs", "step_indices"])
def test_missing_and_surplus_tensors_are_data_loss(missing: str) -> None:
    good = vars(trajectory([1, 2, 3], (4,), chain=False))
    for tensors in ({k: v for k, v in good.items() if k != missing}, {**good, "surplus": torch.zeros(1)}):
        with pytest.raises(DataLoss, match="malformed Trajectory"):
            Trajectory.from_bytes(safetensors.torch.save(tensors, metadata={"format": "flowfleet.trajectory.v1"}))


def test_one_kind_of_blob_is_never_taken_for_another() -> None:
    embeds = EmbedsBlob(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(DataLoss, match=r"of format flowfleet\.trajectory\.v1, found flowfleet\.embeds\.v2"):
        Trajectory.from_bytes(embeds.to_bytes())
    with pytest.raises(DataLoss, match=r"found flowfleet\.trajectory\.v1"):
        EmbedsBlob.from_bytes(trajectory([0], (4,), chain=True).to_bytes())
    with pytest.raises(DataLoss, match=r"of format flowfleet\.trajectory\.v1, found flowfleet\.final\.v1"):
        Trajectory.from_bytes(FinalLatents(torch.zeros(2, 3)).to_bytes())
    with pytest.raises(DataLoss, match=r"found flowfleet\.trajectory\.v1"):
        FinalLatents.from_bytes(trajectory([0], (4,), chain=True).to_bytes())
    with pytest.raises(DataLoss, match="format in its metadata"):
        EmbedsBlob.from_bytes(safetensors.torch.save({"embeds": torch.zeros(2, 3)}))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_foreign_bytes_are_data_loss(data: bytes) -> None:
    with pytest.raises(DataLoss):
        Trajectory.from_bytes(data)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_data_loss_or_another_valid_trajectory(data: st.DataObject) -> None:
    """Never another exception: the checksum is what guards the contents."""
    good = bytearray(trajectory([1, 2], (3,), chain=True).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        Trajectory.from_bytes(damaged)
    except DataLoss:
        return
    assert len(damaged) == len(good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeds_keep_their_dtype_and_bits(dtype: torch.dtype) -> None:
    embeds = values((5, 7), seed=1).to(dtype)
    mask = torch.tensor([True, True, True, False, False])
    read = EmbedsBlob.from_bytes(EmbedsBlob(embeds, mask).to_bytes())
    assert (read.embeds.dtype, bits(read.embeds)) == (dtype, bits(embeds))
    assert torch.equal(read.mask, mask)


def test_extras_come_back_by_name_in_their_dtypes() -> None:
    extras = {
        "pooled": values((6,), seed=2).to(torch.bfloat16),
        "image_latents": values((3, 2, 4), seed=3),
        "grid": torch.tensor([[1, 2, 3]], dtype=torch.int64),
        "embeds": torch.ones(()),
    }
    read = EmbedsBlob.from_bytes(EmbedsBlob(values((5, 7), seed=1), torch.ones(5, dtype=torch.bool), extras).to_bytes())
    assert read.extras.keys() == extras.keys()
    for name, extra in extras.items():
        found = read.extras[name]
        assert (found.shape, found.dtype, bits(found)) == (extra.shape, extra.dtype, bits(extra))


def test_a_row_of_prompts_becomes_a_blob_and_a_row_again() -> None:
    prompts = PromptEmbeds(
        values((2, 5, 7), seed=1), torch.tensor([[True] * 5, [True] * 3 + [False] * 2]), {"pooled": values((2, 6), 2)}
    )
    for place in range(2):
        row = EmbedsBlob.from_bytes(EmbedsBlob.of_row(prompts.select([place])).to_bytes()).row()
        assert bits(row.embeds) == bits(prompts.embeds[place : place + 1])
        assert torch.equal(row.mask, prompts.mask[place : place + 1])
        assert bits(row.extras["pooled"]) == bits(prompts.extras["pooled"][place : place + 1])
        assert row.has_padding == (place == 1)
    with pytest.raises(ValueError, match="unpack"):
        EmbedsBlob.of_row(prompts)


@settings(max_examples=30, deadline=None)
@given(latent=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), seed=st.integers(0, 2**31))
def test_final_latents_come_back_bit_for_bit(latent: tuple[int, ...], seed: int) -> None:
    rows = values((2, *latent), seed)
    read = FinalLatents.from_bytes(FinalLatents(rows[1]).to_bytes())
    assert (read.latents.shape, bits(read.latents)) == (rows[1].shape, bits(rows[1]))


@pytest.mark.parametrize("latents", [torch.zeros(()), torch.zeros(2, 3, dtype=torch.bfloat16)])
def test_final_latents_that_do_not_fit_are_refused(latents: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be float32"):
        FinalLatents(latents)
    with pytest.raises(DataLoss, match="malformed FinalLatents"):
        FinalLatents.from_bytes(safetensors.torch.save({"latents": latents}, metadata={"format": "flowfleet.final.v1"}))


@pytest.mark.parametrize(
    ("embeds", "mask"),
    [
        (torch.zeros(2, 3), torch.ones(3, dtype=torch.bool)),
        (torch.zeros(2, 3), torch.ones(2)),
        (torch.zeros(1, 2, 3), torch.ones(1, dtype=torch.bool)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.bool)),
    ],
)
def test_embeds_that_do_not_fit_are_refused(embeds: torch.Tensor, mask: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        EmbedsBlob(embeds, mask)


def test_the_metadata_is_plain_json_that_names_the_format() -> None:
    data = trajectory([0], (4,), chain=True).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "flowfleet.trajectory.v1"}
