"""The client's part for people's votes: pairs to vote on, votes, what they come to, and preferences made of them."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from flowfleet.api.answers import read
from flowfleet.api.problems import ApiError
from flowfleet.api.votes import (
    Asked,
    Choice,
    Exported,
    Preference,
    Vote,
    VoteGroup,
    VotePair,
    VoteQueue,
    VoteReport,
    VoteSide,
    keep,
)
from flowfleet.client.transport import AsyncTransport, Query


class AsyncVoting(AsyncTransport):
    async def next_votes(self, job_id: str, voter: str = "", count: int = 4) -> VoteQueue:
        """Pairs for a voter, the first to show first. `voter` counts where the API key names no person."""
        query: Query = {"count": count, "voter": voter}
        return read(VoteQueue, (await self._get(f"/v1/jobs/{job_id}/votes/next", query)).json())

    async def vote(self, job_id: str, pair: VotePair, choice: Choice, voter: str = "") -> Vote:
        """Votes on a pair. ApiError (404, 409) where its group takes no votes any more."""
        sides = {"left": pair.left.index, "right": pair.right.index}
        body = {"step": pair.step, "group": pair.group, **sides, "choice": choice, "voter": voter}
        body["id"] = str(uuid.uuid4())
        return read(Vote, (await self._call("POST", f"/v1/jobs/{job_id}/votes", json=body)).json())

    async def side(self, side: VoteSide) -> bytes:
        """The encoded picture or video of one side."""
        return (await self._get(side.media)).content

    async def ask_votes(self, job_id: str, step: int, group: int, asked: Asked) -> VoteGroup:
        """Asks people for votes on a group whose samples have no scores yet, and returns the votes so far."""
        url, body = f"/v1/jobs/{job_id}/votes/groups/{step}/{group}", asked.model_dump(mode="json")
        return read(VoteGroup, (await self._call("PUT", url, json=body)).json())

    def votes(self, job_id: str) -> AsyncIterator[VoteGroup]:
        """Groups with their votes, by step and group."""
        return self._pages(f"/v1/jobs/{job_id}/votes", VoteGroup, {})

    async def vote_report(self, job_id: str) -> VoteReport:
        """How far voters agree with themselves, with one another and with the job's other rewards."""
        return read(VoteReport, (await self._get(f"/v1/jobs/{job_id}/votes/report")).json())

    async def preferences(self, job_id: str) -> list[Preference]:
        """Pairs that most votes decide, by step and group."""
        lines = (await self._get(f"/v1/jobs/{job_id}/votes/preferences")).text.splitlines()
        return [read(Preference, line) for line in lines]

    async def export_preferences(self, job_id: str, directory: Path | str) -> Exported:
        """Writes `preferences.jsonl` and its pictures, which a job with `algorithm.name = "dpo"` takes as `data.train`.

        Leaves pairs out whose pictures are no longer kept."""
        folder, lines, left_out = Path(directory), list[str](), 0
        for one in await self.preferences(job_id):
            names = {column: one.file_of(side) for column, side in one.sides.items()}
            try:
                for column, side in one.sides.items():
                    await asyncio.to_thread(keep, folder / names[column], await self.side(side))
            except ApiError as error:
                if error.status != httpx.codes.NOT_FOUND:
                    raise
                left_out += 1
            else:
                lines.append(json.dumps({"prompt": one.prompt, **names}, ensure_ascii=False) + "\n")
        file = folder / "preferences.jsonl"
        await asyncio.to_thread(keep, file, "".join(lines).encode())
        return Exported(file=file, pairs=len(lines), left_out=left_out)
