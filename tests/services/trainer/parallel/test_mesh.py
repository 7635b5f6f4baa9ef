"""How ranks are arranged: pure."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.parallel.mesh import MOST_OF_DEVICE, STATE_BYTES, Mesh, arrange, degrees
from tests.services.trainer.steps import make_spec

GIB = 2.0**30


@given(copies=st.integers(1, 8), shards=st.integers(1, 8), sequence=st.integers(1, 8))
def test_each_sample_and_each_shard_has_its_ranks(copies: int, shards: int, sequence: int) -> None:
    mesh = Mesh(copies * shards * sequence, copies, sequence)
    assert (mesh.num_shards, mesh.num_parts) == (shards * sequence, copies * shards)
    ranks = range(mesh.world_size)
    parts = [mesh.part(rank) for rank in ranks]
    assert parts == sorted(parts)
    assert all(parts.count(part) == sequence for part in range(mesh.num_parts))
    counted = [mesh.part(rank) for rank in ranks if mesh.counts(rank)]
    assert counted == list(range(mesh.num_parts))  # one rank of each


@pytest.mark.parametrize(
    ("asked", "hosts", "share", "replicate"),
    [(None, 2, 0.9, 2), (None, 2, 1.1, 1), (None, 1, 0.9, 1), (4, 2, 1.1, 4), (1, 2, 0.1, 1)],
)
def test_a_host_has_a_copy_where_its_devices_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: int | None, hosts: int, share: float, replicate: int
) -> None:
    """`share`: of the room for state on a host's devices that a copy takes."""
    on_host = 8 // hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_host))
    spec = make_spec(
        tmp_path, trainer={"world_size": 8, "mesh": {"replicate": asked, "sequence": 2}, "deterministic": False}
    )
    num_elements = int(share * MOST_OF_DEVICE * 80 * GIB * on_host / STATE_BYTES)
    assert arrange(spec, 8, num_elements, 80 * GIB) == Mesh(8, replicate, 2)


def test_another_world_than_the_job_file_says_may_not_divide(tmp_path: Path) -> None:
    spec = make_spec(
        tmp_path, trainer={"world_size": 4, "mesh": {"replicate": 2, "sequence": 2}, "deterministic": False}
    )
    with pytest.raises(ValueError, match=r"trainer\.mesh divides 3 ranks into 2 copies"):
        arrange(spec, 3, 1, None)


@pytest.mark.parametrize(("replicate", "found"), [(None, [1, 2, 4]), (1, [1, 2, 4]), (2, [1, 2, 4]), (4, [1, 2])])
def test_ranks_of_a_host_may_share_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replicate: int | None, found: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    trainer: dict[str, Any] = {"world_size": 8, "deterministic": False}
    assert degrees(make_spec(tmp_path, trainer=trainer | {"mesh": {"replicate": replicate}}), 8) == found
    for degree in found:
        mesh = {"replicate": replicate, "sequence": degree}
        assert arrange(make_spec(tmp_path, trainer=trainer | {"mesh": mesh}), 8, 1, None).sequence == degree
