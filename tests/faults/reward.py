"""The reward service of a chaos stack: `python -m tests.faults.reward --control FILE`.

It scores a picture by its pixels alone, the same each time, and does wrong what the control file says. The file is read
with each call, so a restarted service behaves as its predecessor did.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from PIL import Image

from flowfleet.process.service import rpc_parser, run_service
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    DescribeRequest,
    DescribeResponse,
    RewardSample,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
    ScoreWithGradientRequest,
    ScoreWithGradientResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server
from flowfleet.rewards.requests import SERVICE_NAME, contract_of, no_gradient
from flowfleet.rpc import endpoint as rpc
from tests.faults.tools.control import Control

NAME = "brightness"
SLOW_S = 1.0
"""What a slow call takes more."""
HANG_S = 3600.0
MAX_BATCH = 64


class ChaosReward(RewardServiceServicer):
    def __init__(self, control: Path) -> None:
        self._control = control

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:
        return DescribeResponse(
            name=NAME,
            version="1",
            contract=contract_of(may_wait=False),
            modalities=[MODALITY_IMAGE],
            max_batch_size=MAX_BATCH,
            score_min=0.0,
            score_max=1.0,
        )

    async def ScoreWithGradient(self, request: ScoreWithGradientRequest, context: Any) -> ScoreWithGradientResponse:
        await no_gradient(context)

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        control = Control.read(self._control)
        if control.mode == "unavailable":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to be unavailable")
        await asyncio.sleep({"slow": SLOW_S, "hang": HANG_S}.get(control.mode, 0.0))
        if control.mode == "rubbish":
            return ScoreResponse(
                scores=[RewardScore(sample_id=s.sample_id, score=float("nan")) for s in request.samples]
            )
        return ScoreResponse(scores=answers(request.samples, control))


def answers(samples: Iterable[RewardSample], control: Control) -> list[RewardScore]:
    """What a call gets: poisoned samples their poison, all others their score."""
    found: list[RewardScore] = []
    for sample in samples:
        right = RewardScore(sample_id=sample.sample_id, score=brightness(sample.media))
        found += _poisoned(right, control.poison.get(sample.sample_id.partition("/")[2], ""))
    return found


def brightness(media: bytes) -> float:
    """Mean of all channels of all pixels, 0 to 1."""
    with Image.open(io.BytesIO(media)) as picture:
        return float(np.asarray(picture.convert("RGB"), dtype=np.float64).mean() / 255)


def _poisoned(right: RewardScore, poison: str) -> list[RewardScore]:
    name = right.sample_id
    match poison:
        case "":
            return [right]
        case "nan":
            return [RewardScore(sample_id=name, score=float("nan"))]
        case "error":
            return [RewardScore(sample_id=name, error="told to fail on this sample")]
        case "missing":
            return []
        case "twice":
            return [right, right]
        case "empty":
            return [RewardScore(sample_id=name)]
        case "range":
            return [RewardScore(sample_id=name, score=right.score + 2.0)]
    raise ValueError(f"there is no poison {poison!r}")


async def _serve(options: argparse.Namespace) -> None:
    server, health = rpc.make_server(), rpc.HealthState(SERVICE_NAME)
    add_RewardServiceServicer_to_server(ChaosReward(options.control), server)
    await rpc.serve(
        server,
        host=options.host,
        port=options.port,
        port_file=options.port_file,
        health_port=options.health_port,
        health=health,
        grace_s=1.0,
    )


def main() -> int:
    parser = rpc_parser("Scores pictures by brightness, or fails as the control file says.")
    parser.add_argument("--control", type=Path, required=True, help="JSON file that says what goes wrong")
    return run_service("chaos-reward", _serve, parser)


if __name__ == "__main__":
    sys.exit(main())
