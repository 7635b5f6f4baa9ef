"""The rollout bench at a tiny size: a real replica, and diffusers' pipeline, give every figure."""

import argparse
from pathlib import Path

import pytest

from bench.replica import gauge, seconds_by_part
from bench.rollout import Calls, figures_of, requests
from flowfleet.proto import common_pb2
from recipes.full_size.make_model import write_checkpoint
from tests.bench.running import run_bench

EXPOSITION = """\
# HELP flowfleet_rollout_seconds_total Seconds by part.
flowfleet_rollout_seconds_total{{job="bench",part="encode"}} {encode}
flowfleet_rollout_seconds_total{{job="bench",part="denoise"}} {denoise}
flowfleet_rollout_peak_memory_gib 61.5
"""


def options(model: Path, **changes: object) -> argparse.Namespace:
    base = {"model": model, "warm_up": 1, "images": 4, "batch": 2, "steps": 10, "size": 64, "guidance": 4.0}
    base |= {"device": "cpu", "dtype": "float32", "lora_rank": 0}
    return argparse.Namespace(**base | changes)


def test_figures_are_of_the_calls_after_the_warm_up(tmp_path: Path) -> None:
    """Calls of two samples end at 10, 12 and 16 s: rates 1 and 0.5. Eight forwards of a sample and step take 3 s."""
    pages = [EXPOSITION.format(encode=encode, denoise=denoise) for encode, denoise in ((1, 5), (1.2, 6), (1.6, 8))]
    calls = Calls([10.0, 12.0, 16.0], [[common_pb2.Sample()] * 2] * 3, pages)
    figures = figures_of(options(tmp_path), calls)
    assert figures["images_per_s"] == 0.75
    assert figures["images_per_s_each"] == [1.0, 0.5]
    assert figures["share"] == {"encode": 0.1, "denoise": 0.5}
    assert figures["forward_ms_per_image"] == pytest.approx(3000 / (4 * 10 * 2))
    assert figures["peak_gib"] == 61.5
    assert seconds_by_part(pages[0]) == {"encode": 1.0, "denoise": 5.0}
    assert gauge(pages[0], "flowfleet_rollout_peak") != gauge(pages[0], "flowfleet_rollout_peak")


def test_calls_are_what_the_controller_would_ask_for(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny=True)
    asked = requests(options(model))
    assert len(asked) == 3
    assert len({request.groups[0].prompt for request in asked}) == 3
    seeds = [seed for request in asked for seed in request.groups[0].seeds]
    assert len(set(seeds)) == len(seeds) == 6
    assert {request.sampling.negative_prompt for request in asked} == {" "}


@pytest.mark.long
def test_a_tiny_run_gives_both_rows(tmp_path: Path) -> None:
    flags = "--tiny --device cpu --images 4 --batch 2 --warm-up 1 --guidance 4"
    printed, (bare, service) = run_bench("rollout", flags, tmp_path)
    assert (bare["row"], service["row"]) == ("bare", "service")
    assert bare["images_per_s"] > 0
    assert service["images_per_s"] > 0
    assert service["share"].keys() == {"encode", "denoise", "decode", "publish"}
    assert "| service |" in printed
