"""`flowfleet track --tensorboard` against a real controller process; what it wrote is read by TensorBoard's reader."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowfleet.api.jobs import JobEvent
from flowfleet.client import Client
from flowfleet.job.model_files import read_manifest
from flowfleet.tracking.place import Place, State
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.tracking.played_job import NUM_FRAMES, PROMPTS, FollowerProcess, PlayedJob, reward, rewards_of
from tests.models_on_disk import write_model

pytest.importorskip("tensorboard", reason="it is in flowfleet[tensorboard]")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowfleet.tracking.follower import Follower, follow
from flowfleet.tracking.tensorboard_tracker import TensorBoardTracker

ALL = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}


def read(folder: Path) -> Any:
    found = EventAccumulator(str(folder), size_guidance=ALL)
    found.Reload()
    return found


def points(found: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(name)]


@pytest.mark.long
def test_a_follower_outlives_kills_of_itself_and_of_the_controller(
    idle_controller: IdleController, api_url: str, redis_url: str, tmp_path: Path
) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
    follower = FollowerProcess(api_url, job.id, ["--tensorboard", "tb"], tmp_path, tmp_path / "tb/.flowfleet")
    job.validate(0)
    job.train(0, 1)
    follower.start()
    follower.wait_for(lambda state: (state.step, state.version) == (1, 0))
    follower.kill()
    job.train(2)
    follower.start()
    follower.wait_for(lambda state: state.step == 2)
    idle_controller.kill()
    job.train(3)
    job.validate(4)
    idle_controller.start()
    idle_controller.wait()
    follower.wait_for(lambda state: (state.step, state.version) == (3, 4))
    job.end()
    assert "the job succeeded" in follower.ended()

    train, validation = (read(tmp_path / "tb" / f"played-{job.id}" / name) for name in ("train", "validation"))
    assert points(train, "critic/rewards/mean") == [(step, reward(step)) for step in range(4)]
    assert points(validation, "val/reward") == [(version, reward(version)) for version in (0, 4)]
    assert "actor/loss" not in train.Tags()["scalars"], "NaN has no place in a curve"
    spread = train.Histograms("histograms/rewards")
    assert [event.step for event in spread] == list(range(4))
    last = spread[-1].histogram_value
    assert (last.num, last.min, last.max) == (8, rewards_of(3)[0], rewards_of(3)[-1])
    assert sum(last.bucket) == 8
    assert last.sum == pytest.approx(sum(rewards_of(3)), abs=8 * (last.max - last.min) / 64)
    tags = validation.Tags()["images"]
    assert len(tags) == len(PROMPTS)
    shown = validation.Images(tags[0])
    assert [image.step for image in shown] == [0, 4]
    assert Image.open(io.BytesIO(shown[1].encoded_image_string)).getpixel((5, 5)) == (160, 160, 160)
    (table,) = [event for event in validation.Tensors("pictures") if event.step == 4]
    text = table.tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "| version | prompt | picture | reward | ocr | ocr.exact |"
    assert r"| 4 | a boat \| a moat | 0001-0 | 0.5 | 0.5 | 1 |" in text
    (config,) = train.Tensors("config")
    assert '"seed": 3' in config.tensor_proto.string_val[0].decode()


def test_what_was_written_in_the_moment_of_a_kill_is_not_doubled(api_url: str, redis_url: str, tmp_path: Path) -> None:
    """The place is put back to before the last step and the last validation, which the files have."""
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
        place = Place(tmp_path / "place", job.id)
        job.train(0, 1)
        job.validate(2)
        job.train(2)
        before = follow_until(client, job, place, tmp_path).model_copy(update={"event": "", "step": 1, "version": -1})
        place.write(before)
        job.end()
        follow(client, job.id, TensorBoardTracker(tmp_path / "tb"), place, 4)
    train, validation = (read(tmp_path / "tb" / f"played-{job.id}" / name) for name in ("train", "validation"))
    assert points(train, "critic/rewards/mean") == [(step, reward(step)) for step in range(3)]
    assert points(validation, "val/reward") == [(2, reward(2))]


def follow_until(client: Client, job: PlayedJob, place: Place, folder: Path) -> State:
    """Takes what there is, as a follower that is then killed."""
    tracker = TensorBoardTracker(folder / "tb")
    follower = Follower(client, client.job(job.id), tracker, place, 4)
    with place.held():
        follower.open()
        for event in client.events(job.id):
            follower._take(event)
            if follower._state.step == 2:
                break
    tracker.close()
    return place.read()


def test_the_final_adapter_goes_along(
    idle_controller: IdleController, api_url: str, redis_url: str, tmp_path: Path
) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
        folder = idle_controller.state_dir / "jobs" / job.id
        write_model(folder / "checkpoints/step-00000004/model", job.id, 4, b"weights")
        job.end()
        follow(client, job.id, TensorBoardTracker(tmp_path / "tb"), Place(tmp_path, job.id), 1)
    found = read_manifest(tmp_path / "tb" / f"played-{job.id}" / "adapter")
    assert (found.job_id, found.step) == (job.id, 4)


def test_a_video_plays(api_url: str, redis_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path, num_frames=NUM_FRAMES)
        job.validate(0)
        job.end()
        follow(client, job.id, TensorBoardTracker(tmp_path), Place(tmp_path, job.id), 1)
    validation = read(tmp_path / f"played-{job.id}" / "validation")
    (tag,) = validation.Tags()["images"]
    (shown,) = validation.Images(tag)
    gif = Image.open(io.BytesIO(shown.encoded_image_string))
    assert (gif.format, getattr(gif, "n_frames", 1)) == ("GIF", 1), "equal frames are one in a GIF"
    assert (shown.width, shown.height) == (48, 32)


def test_two_followers_of_one_run_do_not_mix(api_url: str, redis_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
        place = Place(tmp_path, job.id)
        with place.held(), pytest.raises(ValueError, match="another follower writes this run"):
            follow(client, job.id, TensorBoardTracker(tmp_path), place, 1)


def test_events_that_are_gone_are_made_up_for_by_the_metrics(api_url: str, redis_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
        job.train(0, 1)
        job.validate(2)
        job.train(2)
        tracker = TensorBoardTracker(tmp_path)
        follower = Follower(client, client.job(job.id), tracker, Place(tmp_path, job.id), 4)
        follower.open()
        follower._take(JobEvent(id="9-9", type="gap", time=datetime.now(UTC), data={"reason": "gone"}))
        tracker.close()
    assert points(read(tmp_path / f"played-{job.id}" / "train"), "critic/rewards/mean") == [
        (step, reward(step)) for step in range(3)
    ]
    assert points(read(tmp_path / f"played-{job.id}" / "validation"), "val/reward") == [(2, reward(2))]
