"""What videos, edits, experts and preferences ask of a replica, over real gRPC and Redis, on one replica process."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from flowfleet.data.streams import TrajectoryConsumer
from flowfleet.data.trajectories import EmbedsBlob, FinalLatents, Trajectory
from flowfleet.media.files import Frames, decode_media, encode_media
from flowfleet.models.registry import adapter_for
from flowfleet.models.settings import Size
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.redis import keys
from flowfleet.weights import weights
from services.rollout.sampling.media import fit
from tests.services.rollout.replica import Client, ReplicaProcess, Sender, make_generate, make_weights
from tests.tiny_models import make_tiny

INVALID, BROKEN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS
NUM_FRAMES = 5
SPEC = LoraSpec(rank=2, alpha=4.0, target_modules=["to_q", "to_v"])
ODE = rollout_pb2.Noise()
FINAL = common_pb2.RECORD_FINAL
Models = Callable[[str], ModelSpec]
MakeClient = Callable[[], Client]


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, redis_of_module: str) -> Iterator[ReplicaProcess]:
    """Takes the model of whichever job binds it."""
    process = ReplicaProcess(tmp_path_factory.mktemp("replica"), redis_of_module, "--replica-id", "families")
    yield process
    process.terminate()
    assert process.wait() == 0, process.log.read_text()


@pytest.fixture
def client(replica: ReplicaProcess, redis_of_module: str) -> MakeClient:
    return lambda: Client(replica.address, redis_of_module)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A maker of tiny checkpoints by kind, each made once."""
    made: dict[str, ModelSpec] = {}

    def model(kind: str) -> ModelSpec:
        if kind not in made:
            path = make_tiny(kind, tmp_path_factory.mktemp("models") / kind)
            made[kind] = ModelSpec(path=str(path), dtype="float32")
        return made[kind]

    return model


def sampling(**changes: Any) -> rollout_pb2.Sampling:
    usual = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.0}
    return rollout_pb2.Sampling(**usual | changes)


def noise(seed: int, height: int = 32, width: int = 32, num_frames: int = 1) -> Frames:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


async def put(c: Client, job_id: str, frames: Frames) -> common_pb2.Media:
    """A file in the job's store, named by its content."""
    data, media_type = encode_media(frames)
    ref = await c.blobs.put(keys.blob(job_id, "given", hashlib.sha256(data).hexdigest()), data)
    return common_pb2.Media(blob=ref, media_type=media_type)


async def invalid(c: Client, request: rollout_pb2.GenerateRequest, expected: grpc.StatusCode = INVALID) -> str:
    """The message with which a request is refused, by default as the caller's mistake."""
    code, message = await c.refusal(c.generate(request))
    assert code is expected, message
    return message


async def test_videos_of_two_experts(client: MakeClient, models: Models) -> None:
    """An adapter in both experts; steps of both; MP4s that show what the latents decode to."""
    model = models("wan_two_experts")
    size = Size(32, 32, NUM_FRAMES)

    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("vae",))
    async with client() as c:
        state = await c.publish_adapter("video", 0, model, SPEC, seed=1)
        assert {name.partition(".")[0] for name in state} == {"transformer", "transformer_2"}
        assert (await c.status()).weights_digest == weights.digest(weights.tensor_hashes(state.items()))
        request = make_generate("video", 0, sampling=sampling(num_frames=NUM_FRAMES, num_inference_steps=3))
        samples = await c.generate(request)
        paths = [Trajectory.from_bytes(await c.blobs.get(sample.trajectory)) for sample in samples]
        shown = adapter.decode(torch.stack([path.next_latents[-1] for path in paths]), size).numpy()
        for sample, frames in zip(samples, shown, strict=True):
            assert (sample.media_type, sample.num_frames, list(sample.sde_steps)) == ("video/mp4", 5, [1, 2])
            data = await c.blobs.get(sample.media)
            assert np.array_equal(decode_media(data, "video/mp4"), decode_media(*encode_media(frames)))
        message = await invalid(c, make_generate("video", 0, sampling=sampling(num_frames=4), noise=ODE, record=FINAL))
        assert "num_frames must be 1 more than a multiple of 4" in message
        assert len({sample.media.sha256 for sample in samples}) == 6


async def test_full_weights_of_two_experts_by_broadcast(client: MakeClient, models: Models) -> None:
    model = models("wan_two_experts")

    async def publish(c: Client, sender: Sender, version: int, tensors: dict[str, torch.Tensor]) -> None:
        buckets = weights.make_buckets(weights.specs_of(tensors), bucket_bytes=100_000)
        await c.start("full", version)
        broadcast = rollout_pb2.Broadcast(group_id=sender.group.group_id, buckets=buckets)
        update = rollout_pb2.UpdateWeightsRequest(job_id="full", version=version, broadcast=broadcast)
        await asyncio.gather(sender.send(buckets, tensors), c.call("UpdateWeights", update))

    async with client() as c:
        tensors = make_weights(model, 0.01)
        assert {name.partition(".")[0] for name in tensors} == {"transformer", "transformer_2"}
        sender = Sender("both", timeout_s=30)
        await asyncio.gather(sender.join(), c.init("full", model, group=sender.replica_group()))
        hashes = weights.tensor_hashes(tensors.items())
        await publish(c, sender, 0, tensors)
        await c.finish("full", 0, hashes)
        assert (await c.status()).weights_digest == weights.digest(hashes)
        request = make_generate("full", 0, sampling=sampling(num_frames=NUM_FRAMES), noise=ODE, record=FINAL)
        assert len(await c.generate(request)) == 6

        name = next(name for name in reversed(tensors) if name.startswith("transformer_2."))
        tensors[name] = tensors[name] + 1e-6
        await publish(c, sender, 1, tensors)
        code, message = await c.refusal(c.finish("full", 1, hashes))
        assert (code, name in message) == (grpc.StatusCode.DATA_LOSS, True)


async def test_final_latents_go_with_any_noise(client: MakeClient, models: Models) -> None:
    """And are what the recorded steps end in; steps need noise."""
    async with client() as c:
        await c.publish_adapter("final", 0, models("qwen_image"), SPEC, seed=1)
        noisy = rollout_pb2.Noise(step_type="sde", eta=0.7, sde_steps=[0, 1])
        for noise_of in (noisy, ODE):
            ended = make_generate("final", 0, sampling=sampling(), noise=noise_of, record=FINAL)
            samples = await c.generate(ended)
            assert [list(sample.sde_steps) for sample in samples] == [list(noise_of.sde_steps)] * 6
            latents = [FinalLatents.from_bytes(await c.blobs.get(s.trajectory)).latents for s in samples]
            if noise_of is noisy:
                steps = await c.generate(make_generate("final", 0, sampling=sampling(), noise=noisy))
                paths = [Trajectory.from_bytes(await c.blobs.get(s.trajectory)) for s in steps]
                assert all(torch.equal(p.next_latents[-1], x) for p, x in zip(paths, latents, strict=True))
                assert [s.media for s in steps] == [s.media for s in samples]
        message = await invalid(c, make_generate("final", 0, sampling=sampling(), noise=ODE))
        assert "RECORD_STEPS needs sde_steps, and eta > 0 or recorded_steps" in message
        assert "RECORD_FINAL" in message


async def edits(c: Client, pictures: list[list[Frames]], **changes: Any) -> rollout_pb2.GenerateRequest:
    """A group of two samples for each list of condition images."""
    settings = {"sampling": sampling(condition_pixels=1024, guidance_scale=3.0, negative_prompt="blurry")}
    request = make_generate("edit", 0, **settings | {"noise": ODE, "record": FINAL, **changes})
    del request.groups[len(pictures) :]
    for group, images in zip(request.groups, pictures, strict=True):
        group.images.extend([await put(c, "edit", image) for image in images])
    return request


async def test_edits_see_their_condition_images(client: MakeClient, models: Models) -> None:
    """The images come with prompt and negative prompt, a blob of each a group, and steer what is drawn."""
    async with client() as c:
        await c.publish_adapter("edit", 0, models("qwen_image_edit"), SPEC, seed=1)
        samples = await c.generate(await edits(c, [[noise(1)], [noise(2, 64, 64)]]))
        assert len({sample.prompt_embeds.uri for sample in samples}) == 2
        assert len({sample.negative_embeds.uri for sample in samples}) == 2
        for sample in samples:
            prompt, negative = [
                EmbedsBlob.from_bytes(await c.blobs.get(ref)) for ref in (sample.prompt_embeds, sample.negative_embeds)
            ]
            assert torch.equal(prompt.extras["image_1"], negative.extras["image_1"])
            assert prompt.extras["image_1"].shape == (2, 2, 64)  # 32 × 32 pixels in tokens of 16 × 16
        others = await c.generate(await edits(c, [[noise(1)], [noise(3, 64, 64)]]))
        assert [s.media for s in others[:3]] == [s.media for s in samples[:3]]
        assert not {s.media.uri for s in others[3:]} & {s.media.uri for s in samples[3:]}


async def test_edits_that_cannot_be_made_say_what_to_change(client: MakeClient, models: Models) -> None:
    async with client() as c:
        await c.publish_adapter("edit", 0, models("qwen_image_edit"), SPEC, seed=1)
        uneven = await edits(c, [[noise(1)], [noise(2, 32, 64)]], sampling=sampling(condition_pixels=4096))
        assert "aspect ratio" in await invalid(c, uneven)
        assert "of one number" in await invalid(c, await edits(c, [[noise(1)], [noise(2), noise(3)]]))
        assert "needs condition images" in await invalid(c, await edits(c, [[], []]))
        assert "to all groups" in await invalid(c, await edits(c, [[noise(1)], []]))
        assert "more than 8" in await invalid(c, await edits(c, [[noise(1)] * 9, [noise(1)]]))
        assert "1 to 3 condition images" in await invalid(c, await edits(c, [[noise(1)] * 4, [noise(1)] * 4]))
        video = await edits(c, [[noise(1, num_frames=5)], [noise(2)]])
        assert "must be pictures" in await invalid(c, video, BROKEN)
        wrong = await edits(c, [[noise(1)], [noise(2)]])
        wrong.groups[1].images[0].media_type = "image/jpeg"
        assert "group 1" in await invalid(c, wrong, BROKEN)
        gone = await edits(c, [[noise(1)], [noise(2)]])
        gone.groups[0].images[0].blob.uri += "x"
        code, _ = await c.refusal(c.generate(gone))
        assert code is grpc.StatusCode.NOT_FOUND
        assert (await c.status()).in_flight == 0

        await c.publish_adapter("plain", 0, models("qwen_image"), SPEC, seed=1)
        shown = await edits(c, [[noise(1)], [noise(2)]], sampling=sampling(), job_id="plain")
        assert "takes no condition images" in await invalid(c, shown)


async def pairs(c: Client, job_id: str, media: list[Frames], **changes: Any) -> rollout_pb2.GenerateRequest:
    """One group, a sample for each of the media, whose indices fall."""
    request = make_generate(job_id, 0, **{"sampling": sampling(), "noise": ODE, "record": FINAL, **changes})
    del request.groups[1:]
    (group,) = request.groups
    del group.indices[:], group.seeds[:]
    group.indices.extend(range(len(media) - 1, -1, -1))
    group.seeds.extend(range(len(media)))
    group.media.extend([await put(c, job_id, frames) for frames in media])
    return request


@pytest.mark.parametrize(
    ("kind", "size", "media"),
    [
        ("qwen_image", Size(32, 48), [noise(1, 32, 48), noise(2, 80, 60)]),
        ("wan", Size(32, 32, NUM_FRAMES), [noise(3, num_frames=5), noise(4, 48, 64, 9)]),
    ],
)
async def test_finished_media_are_encoded_and_published_like_samples(
    client: MakeClient, models: Models, kind: str, size: Size, media: list[Frames]
) -> None:
    """Nothing is sampled: the given blob is the sample's, its latents those of the adapter."""
    model, job_id = models(kind), f"pairs-{kind}"
    adapter = adapter_for(model.path).load(model.path, dtype=torch.float32, components=("vae",))
    given = [decode_media(*encode_media(frames)) for frames in media]
    expected = adapter.encode_media(torch.from_numpy(np.stack([fit(frames, size) for frames in given])), size)
    async with client() as c:
        await c.publish_adapter(job_id, 0, model, SPEC, seed=1)
        asked = sampling(height=size.height, width=size.width, num_frames=size.num_frames)
        request = await pairs(c, job_id, media, sampling=asked)
        samples = await c.generate(request)
        assert [sample.id.index for sample in samples] == [0, 1]
        for sample in samples:
            place = 1 - sample.id.index
            assert (sample.media, sample.media_type) == (
                request.groups[0].media[place].blob,
                request.groups[0].media[place].media_type,
            )
            assert (sample.seed, sample.num_frames, list(sample.sde_steps)) == (place, size.num_frames, [])
            latents = FinalLatents.from_bytes(await c.blobs.get(sample.trajectory)).latents
            torch.testing.assert_close(latents, expected[place], rtol=0, atol=1e-5)
            EmbedsBlob.from_bytes(await c.blobs.get(sample.prompt_embeds))
        streamed = await TrajectoryConsumer(c.redis, job_id, consumer="test").read(10, 1000)
        assert sorted((delivery.sample for delivery in streamed), key=lambda sample: sample.id.index) == samples


async def test_media_that_cannot_be_learned_from_say_what_to_change(client: MakeClient, models: Models) -> None:
    async with client() as c:
        await c.publish_adapter("pairs", 0, models("wan"), SPEC, seed=1)
        videos = [noise(1, num_frames=5), noise(2, num_frames=5)]
        wanted = {"sampling": sampling(num_frames=NUM_FRAMES)}
        for changes in ({"record": common_pb2.RECORD_STEPS}, {"purpose": common_pb2.PURPOSE_VALIDATE}):
            message = await invalid(c, await pairs(c, "pairs", videos, **wanted, **changes))
            assert "PURPOSE_TRAIN and RECORD_FINAL" in message
        short = await pairs(c, "pairs", [noise(3, num_frames=5), noise(4)], **wanted)
        assert "its 1 frames are fewer than" in await invalid(c, short, BROKEN)
        odd = await pairs(c, "pairs", videos, **wanted)
        del odd.groups[0].media[1]
        assert "one of media an index" in await invalid(c, odd)
