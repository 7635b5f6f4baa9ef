"""Preference data sets: pairs by hand, and one of a base's own pictures that a job can read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowfleet.prompts.columns import Columns, read_row
from recipes.composition.base import preferences
from recipes.composition.base.preferences import main, parse_options
from recipes.composition.captions import prompt_lines
from recipes.composition.judges.agreement import Judge
from recipes.composition.judges.files import Kind
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.reward import RewardJudge
from recipes.composition.scenes import choose
from recipes.composition.world import World
from recipes.tiny.pairs import FILE, Preference, painter_of, preferences_of, write_preferences
from recipes.tiny.signs import Pixels

BASE = Path(__file__).parents[3] / "recipes/composition/model"


@pytest.fixture
def options(world: World, tmp_path: Path) -> list[str]:
    """A world of shapes, two prompts, and a judge that learned nothing."""
    lines = prompt_lines(world, choose(world, 2, torch.Generator().manual_seed(1)))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.manual_seed(1)
    RewardJudge(Kind.of("reward", world)).save(tmp_path / "reward.safetensors")
    common = f"--model {BASE} --world small --device cpu --sampling-steps 2 --pictures 4 --pairs 3"
    own = f"--prompts {tmp_path}/prompts.jsonl --reward {tmp_path}/reward.safetensors --output {tmp_path}/pairs"
    return f"{common} {own}".split()


def brightness(judge: Judge, pictures: Pixels, lines: object, score: str) -> list[float]:
    return [float(picture.mean()) for picture in pictures]


def test_pairs_are_of_one_prompt_and_of_different_rewards() -> None:
    pictures = np.arange(8, dtype=np.uint8)[:, None, None, None]
    found = preferences_of(pictures, ["a"] * 4 + ["b"] * 4, [0, 1, 0.5, 0.5, 1, 1, 1, 0], 4, 2)
    assert [(one.prompt, int(one.chosen.item()), int(one.rejected.item())) for one in found] == [
        ("a", 1, 0),  # the two of 0.5 are alike
        ("b", 4, 7),
    ]


def test_a_data_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    write_preferences(
        tmp_path / "new", [Preference("a cat", white, black), Preference("a cat", black, white)], tmp_path
    )
    assert painter_of(tmp_path / "new") == tmp_path
    assert painter_of(tmp_path) is None
    url = str(tmp_path / "new" / FILE)
    rows = [json.loads(line) for line in Path(url).read_text().splitlines()]
    for row, chosen in zip(rows, (white, black), strict=True):
        prompt = read_row(row, url, 1, Columns("preferences"))
        assert prompt.text == "a cat"
        read = [np.asarray(Image.open(path)) for path in prompt.media]
        assert (read[0] == chosen).all()
        assert (read[1] == 255 - chosen).all()


def test_a_base_paints_until_there_are_enough_pairs(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four pictures make two pairs: of the second prompt one is needed."""
    monkeypatch.setattr(preferences, "scores", brightness)
    monkeypatch.setattr(preferences, "BATCH_SIZE", 4)
    main(options)
    assert json.loads(capsys.readouterr().out) == {"pairs": 3, "pictures_made": 8, "output": f"{tmp_path}/pairs"}
    rows = [json.loads(line) for line in (tmp_path / "pairs" / FILE).read_text().splitlines()]
    first, second = (json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines())
    assert [row["prompt"] for row in rows] == [first, first, second]
    for row in rows:
        chosen, rejected = (np.asarray(Image.open(tmp_path / "pairs" / row[name])) for name in ("chosen", "rejected"))
        assert chosen.shape == (64, 64, 3)
        assert chosen.mean() > rejected.mean()


def test_a_reward_that_prefers_nothing_ends_it(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "scores", lambda judge, pictures, lines, score: [1.0] * len(pictures))
    with pytest.raises(ValueError, match="scores all pictures of a prompt alike, for each prompt: raise --pictures"):
        main(options)


def test_the_held_out_judge_prefers_nothing(options: list[str], world: World, tmp_path: Path) -> None:
    HeldoutJudge(Kind.of("heldout", world)).save(tmp_path / "reward.safetensors")
    with pytest.raises(ValueError, match="held-out judge, which training must never see"):
        main(options)


def test_one_picture_leaves_nothing_to_prefer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--world", "small", "--model", "a", "--output", "b", "--pictures", "1"])
    assert "--pictures 1 leaves nothing to prefer: give 2 or more" in capsys.readouterr().err
