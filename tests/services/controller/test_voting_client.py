"""The client and `flowfleet votes` against the API: votes, reports, and a preference file that dpo reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from flowfleet.api.problems import ApiError
from flowfleet.api.votes import Asked, VoteSample
from flowfleet.cli.votes import show_report
from flowfleet.client import AsyncClient
from flowfleet.media.files import encode_media
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.stores import read_prompts
from services.controller.rewards import trials
from services.controller.store.sample_refs import SampleRefs
from services.controller.votes import pairing
from tests.services.controller.api.routes.test_votes import running
from tests.services.controller.conftest import Api


def client_of(api: Api) -> AsyncClient:
    return AsyncClient("http://127.0.0.1:8080", transport=httpx.ASGITransport(api.app))


async def test_votes_become_a_preference_file(
    api: Api, job: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "TRIAL_S", 0.05)
    monkeypatch.setattr(pairing, "CHECK_SHARE", 0.0)
    job_id = await running(api, job, size=3, groups=2)
    await _paint(api, job_id)
    asked = Asked(prompt="a sign", samples=[VoteSample(index=index) for index in range(3)], wanted=3)
    async with client_of(api) as client:
        for group in range(2):
            await client.ask_votes(job_id, 3, group, asked)
        while pairs := (await client.next_votes(job_id, "ann", 1)).pairs:
            (pair,) = pairs
            brighter = pair.left.index > pair.right.index
            await client.vote(job_id, pair, "left" if brighter else "right", "ann")
        with pytest.raises(ApiError, match="no votes are asked"):
            await client.vote(job_id, pair.model_copy(update={"group": 9}), "left")
        assert [len(one.votes) >= 3 async for one in client.votes(job_id)] == [True, True]
        report = await client.vote_report(job_id)
        written = await client.export_preferences(job_id, tmp_path / "preferences")
        assert (written.pairs, written.left_out) == (6, 0)
        await api.services.redis.delete(*[f"ff:{job_id}:blob:media:3:0:{index}" for index in range(3)])
        assert (await client.export_preferences(job_id, tmp_path / "fewer")).left_out == 3
    rows = [json.loads(line) for line in written.file.read_text().splitlines()]
    assert all(row["chosen"] > row["rejected"] for row in rows)  # by index, so the brighter one
    read = read_prompts(str(written.file), Columns(kind="preferences"))
    assert [Path(one.media[0]).name for one in read] == [row["chosen"] for row in rows]
    assert (tmp_path / "preferences" / rows[0]["chosen"]).read_bytes().startswith(b"\x89PNG")
    console = Console(file=io.StringIO(), width=120)
    show_report(report, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ann" in shown
    assert "only guard" not in shown  # ocr


async def _paint(api: Api, job_id: str) -> None:
    """Pictures in place of the texts that `running` stored."""
    refs = SampleRefs(api.services.redis, api.services.blobs, job_id)
    for group in range(2):
        for index in range(3):
            found = await refs.find(3, group, index)
            assert found is not None
            picture = encode_media(np.full((1, 8, 8, 3), 80 * index, np.uint8))[0]
            found.media.CopyFrom(await api.services.blobs.put(f"ff:{job_id}:blob:media:3:{group}:{index}", picture))
            async with api.services.redis.pipeline(transaction=True) as pipe:
                await refs.remove(3, [found], pipe)
                await refs.put([found], pipe)
                await pipe.execute()
