"""The chaos reward scores by pixels alone, and each poison costs its own sample."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from PIL import Image

from flowfleet.proto.reward_pb2 import RewardSample
from tests.faults.reward import answers, brightness
from tests.faults.schedule import POISONS
from tests.faults.tools.control import Control


def picture(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (level, level, level)).save(file, "PNG")
    return file.getvalue()


SAMPLES = [RewardSample(sample_id=f"job/3/1/{index}", media=picture(51 * index)) for index in range(3)]


def test_scores_are_mean_brightness() -> None:
    assert [brightness(picture(level)) for level in (0, 51, 255)] == [0.0, 0.2, 1.0]
    assert [one.score for one in answers(SAMPLES, Control())] == [0.0, 0.2, 0.4]


@pytest.mark.parametrize("poison", POISONS)
def test_a_poison_costs_its_own_sample(poison: str) -> None:
    found = answers(SAMPLES, Control({"3/1/1": poison}))
    good = {one.sample_id: one.score for one in found if one.sample_id != "job/3/1/1"}
    assert good == {"job/3/1/0": 0.0, "job/3/1/2": 0.4}
    bad = [one for one in found if one.sample_id == "job/3/1/1"]
    usable = [one for one in bad if one.WhichOneof("outcome") == "score" and 0 <= one.score <= 1]
    assert len(bad) != 1 or not usable or math.isnan(bad[0].score)


def test_the_control_file_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("control") / "reward.json"
    assert Control.read(path) == Control()
    Control({"1/0/0": "nan"}, "slow").write(path)
    assert Control.read(path) == Control({"1/0/0": "nan"}, "slow")
