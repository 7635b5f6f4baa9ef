"""The service as a process, over real gRPC."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from flowfleet.media.files import encode_media
from flowfleet.process.service import PATIENT_THREADS
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    MODALITY_VIDEO,
    DescribeRequest,
    DescribeResponse,
    RewardSample,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rpc.endpoint import open_channel
from services.reward import __main__ as main_module
from tests.forks import run
from tests.services.reward.conftest import ServiceProcess, reward_process
from tests.services.reward.pictures import encoded, sample, sign, sign_sample
from tests.waiting import until

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub

T = TypeVar("T")


async def ask(address: str, call: Callable[[RewardServiceAsyncStub], Awaitable[T]]) -> T:
    async with open_channel(address) as channel:
        return await call(RewardServiceStub(channel))


async def score(service: ServiceProcess, samples: Sequence[RewardSample], **params: str) -> dict[str, RewardScore]:
    request = ScoreRequest(samples=samples, params=params)
    response = await ask(service.address, lambda stub: stub.Score(request, timeout=30))
    assert len(response.scores) == len(samples)
    return {score.sample_id: score for score in response.scores}


async def refusal(service: ServiceProcess, samples: Sequence[RewardSample], **params: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, samples, **params)
    return caught.value


async def test_describe_tells_the_truth(ocr_process: ServiceProcess) -> None:
    answer: DescribeResponse = await ask(ocr_process.address, lambda stub: stub.Describe(DescribeRequest(), timeout=5))
    assert (answer.name, answer.score_min, answer.score_max) == ("ocr", 0.0, 1.0)
    assert (answer.max_batch_size, answer.needs_group) == (16, False)
    assert list(answer.modalities) == [MODALITY_IMAGE, MODALITY_VIDEO]
    assert "PP-OCR" in answer.version
    given = (await score(ocr_process, [sign_sample("a", "AB3")]))["a"]
    assert set(given.components) == set(answer.components) - {"lines"}  # which a page alone has


async def test_health_is_serving(ocr_process: ServiceProcess) -> None:
    async with open_channel(ocr_process.address) as channel:
        request = health_pb2.HealthCheckRequest(service="flowfleet.v1.RewardService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        assert int(answer.status) == health_pb2.HealthCheckResponse.SERVING


async def test_scores_belong_to_their_ids(ocr_process: ServiceProcess) -> None:
    """Expected scores follow from the words alone: 1 − distance / length."""
    samples = [sign_sample("third", "WXYZ", "WXYB"), sign_sample("first", "WXYZ"), sign_sample("2nd", "WXYZ", "3333")]
    scores = await score(ocr_process, samples)
    assert {name: given.score for name, given in scores.items()} == {"third": 0.75, "first": 1.0, "2nd": 0.0}
    assert all(math.isfinite(value) for given in scores.values() for value in given.components.values())


async def test_each_score_tells_the_size_of_the_file_that_was_scored(ocr_process: ServiceProcess) -> None:
    """The size lets the controller detect scores exchanged between batcher, processes and answer."""
    asked = [sign_sample(str(number), "WXYZ"[: number + 1]) for number in range(4)]
    told = {name: given.media_size for name, given in (await score(ocr_process, asked)).items()}
    assert told == {one.sample_id: len(one.media) for one in asked}
    assert len(set(told.values())) == len(asked)


async def test_unicode_ids_prompts_and_metadata_pass(ocr_process: ServiceProcess) -> None:
    subject = sample("job/1/グループ/🎨", sign("AB3"), 'Ein grünes Schild „sagt“ "ab3" 看板 🎨')
    subject.metadata["ключ"] = "значение"
    assert (await score(ocr_process, [subject]))["job/1/グループ/🎨"].score == 1.0


async def test_bad_samples_get_their_own_error(ocr_process: ServiceProcess) -> None:
    samples = [
        sign_sample("good", "AB3"),
        RewardSample(sample_id="junk", media=b"junk", media_type="image/png", prompt='"AB3"'),
        RewardSample(sample_id="cut", media=encoded(sign("AB3"))[:200], media_type="image/png", prompt='"AB3"'),
        RewardSample(sample_id="video", media=b"...", media_type="video/mp4", prompt='"AB3"'),
        RewardSample(sample_id="sound", media=b"...", media_type="audio/wav", prompt='"AB3"'),
        sample("large", Image.new("1", (5000, 5000)), '"AB3"'),
        sample("unquoted", sign("AB3"), "a sign that says AB3"),
    ]
    before = ocr_process.metric("flowfleet_reward_errors_total", reason="undecodable")
    scores = await score(ocr_process, samples)
    assert scores["good"].score == 1.0
    assert {name for name, given in scores.items() if given.WhichOneof("outcome") == "score"} == {"good"}
    for name, says in {
        "junk": "not a whole image/png",
        "cut": "not a whole image/png",
        "video": "not a whole video/mp4",
        "sound": "send image/png, image/jpeg, image/webp, video/mp4",
        "large": "5000 x 5000",
        "unquoted": "double quotes",
    }.items():
        assert says in scores[name].error
    assert ocr_process.metric("flowfleet_reward_errors_total", reason="undecodable") == before + 3


async def test_videos_are_scored_beside_pictures(ocr_process: ServiceProcess) -> None:
    still = np.asarray(sign("AB3"))
    media, media_type = encode_media(np.stack([still, still, still]))
    video = RewardSample(sample_id="video", media=media, media_type=media_type, prompt='"AB3"')
    scores = await score(ocr_process, [sign_sample("picture", "AB3"), video])
    assert scores["video"].score == scores["picture"].score == 1.0


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "samples is empty"),
        ([str(number) for number in range(17)], "17 samples in one call, the limit is 16"),
        (["a", "b", "a"], "'a' occurs twice"),
        (["a", ""], r"samples[1].sample_id is empty"),
    ],
)
async def test_malformed_calls_are_invalid_arguments(ocr_process: ServiceProcess, ids: list[str], says: str) -> None:
    error = await refusal(ocr_process, [sign_sample(name, "AB3") for name in ids])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in (error.details() or "")


async def test_unknown_parameters_name_the_valid_ones(ocr_process: ServiceProcess) -> None:
    error = await refusal(ocr_process, [sign_sample("a", "AB3")], corp="0,0,1,1")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "params.corp is unknown: this scorer takes region, crop, alphanumeric, score, min_width, detection_size"
    )


async def test_concurrent_callers_share_batches(ocr_process: ServiceProcess) -> None:
    async def four(stub: RewardServiceAsyncStub) -> list[ScoreResponse]:
        words = ["AB3", "CD4", "EF5", "GH6"]
        requests = [ScoreRequest(samples=[sign_sample(word, word)]) for word in words]
        return await asyncio.gather(*(stub.Score(request, timeout=30) for request in requests))

    name = "flowfleet_reward_batch_size_count"
    before = ocr_process.metric(name)
    responses = await ask(ocr_process.address, four)
    assert [[given.sample_id for given in response.scores] for response in responses] == [
        ["AB3"],
        ["CD4"],
        ["EF5"],
        ["GH6"],
    ]
    assert all(given.score == 1.0 for response in responses for given in response.scores)
    assert ocr_process.metric(name) == before + 1


async def test_different_parameters_never_share(ocr_process: ServiceProcess) -> None:
    async def two(stub: RewardServiceAsyncStub) -> list[ScoreResponse]:
        subject = sign_sample("a", "WXYZ", "W-X-Y-Z")
        requests = [ScoreRequest(samples=[subject], params={"alphanumeric": flag}) for flag in ("true", "false")]
        return await asyncio.gather(*(stub.Score(request, timeout=30) for request in requests))

    alone, dashed = (response.scores[0].score for response in await ask(ocr_process.address, two))
    assert alone == 1.0
    assert dashed == pytest.approx(1 - 3 / 7)


async def test_a_deadline_is_kept(ocr_process: ServiceProcess) -> None:
    """The service waits 200 ms for company, this caller only 50."""
    request = ScoreRequest(samples=[sign_sample("a", "AB3")])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(ocr_process.address, lambda stub: stub.Score(request, timeout=0.05))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await score(ocr_process, [sign_sample("b", "AB3")]))["b"].score == 1.0


async def test_sigterm_finishes_what_was_admitted(tmp_path: Path) -> None:
    """The call waits a minute for company; the drain sends it off at once."""
    with reward_process(tmp_path, "--scorer", "jpeg_compressibility", "--max-wait-ms", "60000") as service:

        async def during(stub: RewardServiceAsyncStub) -> ScoreResponse:
            call = stub.Score(ScoreRequest(samples=[sign_sample("a", "AB3")]), timeout=30)
            await until(lambda: service.metric("flowfleet_reward_queued_samples"))
            service.process.send_signal(signal.SIGTERM)
            return await call

        assert (await ask(service.address, during)).scores[0].score < 0.0
        assert service.process.wait(10) == 0
        lines = [json.loads(line) for line in service.log.read_text().splitlines()]
        assert lines[-1]["msg"] == "stopped"
        assert {line["service"] for line in lines} == {"reward"}


async def test_a_drain_ends_when_its_time_is_over(tmp_path: Path) -> None:
    """The call waits a minute for company, and the drain has no time to send it off."""
    flags = ("--scorer", "jpeg_compressibility", "--max-wait-ms", "60000", "--drain-s", "0")
    with reward_process(tmp_path, *flags) as service:

        async def during(stub: RewardServiceAsyncStub) -> grpc.StatusCode:
            call = stub.Score(ScoreRequest(samples=[sign_sample("a", "AB3")]), timeout=30)
            await until(lambda: service.metric("flowfleet_reward_queued_samples"))
            service.process.send_signal(signal.SIGTERM)
            code: grpc.StatusCode = await call.code()
            return code

        assert await ask(service.address, during) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert service.process.wait(10) == 0
        assert "calls were still running after 0 s" in service.log.read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--scorer", "orc"], "no scorer is called 'orc': take one of aesthetic, clap"),
        (["--scorer", "jpeg_compressibility", "--max-batch", "0"], "--max-batch 0: must be at least 1"),
        (["--scorer", "jpeg_compressibility", "--max-wait-ms", "-1"], "--max-wait-ms -1.0: must be 0 to 60000"),
        (["--scorer", "jpeg_compressibility", "--host", "0.0.0.0"], "FLOWFLEET_RPC_TOKEN"),
    ],
)
def test_wrong_flags_say_what_to_change(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWFLEET_RPC_TOKEN", raising=False)
    code, written = run([sys.executable, "-m", "services.reward", *flags], env=os.environ)
    assert code == 2
    assert says in written
    assert "Traceback" not in written


def test_the_service_needs_neither_torch_nor_a_redis() -> None:
    program = "import sys, services.reward.__main__, services.reward.scorers.ocr; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.strip() == "False"


def test_threads_that_wait_leave_the_cores_to_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is imported, in this process or in one that scores: OpenMP reads it then."""
    for name in PATIENT_THREADS:
        monkeypatch.delenv(name)
    monkeypatch.setattr(main_module, "run_service", lambda *_: 0)
    assert main_module.main() == 0
    assert {name: os.environ[name] for name in PATIENT_THREADS} == PATIENT_THREADS
