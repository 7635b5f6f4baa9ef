"""What a rollout stores of a batch, by what its samples are for, against a real Redis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from flowfleet.data.blobs import RedisBlobs
from flowfleet.data.trajectories import FinalLatents
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.proto import common_pb2
from flowfleet.proto.rollout_pb2 import GenerateRequest, PromptGroup
from flowfleet.redis.client import connect
from services.rollout.engines.base import GeneratedBatch, GeneratedSample
from services.rollout.sampling.publisher import Publisher

JOB = "0190c0de-0000-7000-8000-000000000000"
PROMPT = PromptEmbeds(torch.zeros(1, 3, 4), torch.ones(1, 3, dtype=torch.bool))
ENCODED = EncodedPrompt(torch.arange(3))
FRAME = np.zeros((1, 16, 16, 3), np.uint8)


@pytest.mark.parametrize("prompt", [PROMPT, ENCODED])
@pytest.mark.parametrize(
    ("purpose", "kinds"),
    [
        (common_pb2.PURPOSE_TRAIN, {"embeds", "negative", "trajectory", "media"}),
        (common_pb2.PURPOSE_VALIDATE, {"media"}),
        (common_pb2.PURPOSE_PREVIEW, {"media"}),
    ],
)
async def test_embeddings_are_stored_for_training_alone(
    redis_url: str, purpose: common_pb2.Purpose.ValueType, kinds: set[str], prompt: PromptEmbeds | EncodedPrompt
) -> None:
    record = FinalLatents(torch.zeros(4)) if purpose == common_pb2.PURPOSE_TRAIN else None
    batch = GeneratedBatch((GeneratedSample(0, 0, 1, record, FRAME),), {0: prompt}, {0: PROMPT}, {}, {})
    request = GenerateRequest(job_id=JOB, purpose=purpose, groups=[PromptGroup(group=0, indices=[0])])
    client = connect(redis_url)
    with ThreadPoolExecutor(1) as pool:
        [sample] = await Publisher(client, RedisBlobs(client), "r", pool).publish(request, batch)
    stored = {name.decode().split(":")[3] async for name in client.scan_iter(match=f"ff:{JOB}:blob:*")}
    assert stored == kinds
    assert sample.HasField("prompt_embeds") == sample.HasField("negative_embeds") == ("embeds" in kinds)
    await client.aclose()
