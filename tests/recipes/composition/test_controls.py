"""Controls of reinforcement learning: weights by hand, and each kind from its command to a folder that loads."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.composition.base import controls
from recipes.composition.base.components import ModelSize, build_pipeline
from recipes.composition.base.controls import main, parse_options, weights_of
from recipes.composition.base.flow import FlowRecipe, Pictures, pictures_of, train_transformer
from recipes.composition.base.training import Report, seconds_at_speed
from recipes.composition.captions import prompt_lines, words
from recipes.composition.judges.files import Kind
from recipes.composition.judges.heldout import HeldoutJudge
from recipes.composition.judges.reward import RewardJudge
from recipes.composition.pretrain import grid_of, load, save, scenes_to_learn, weights_hash
from recipes.composition.scenes import choose
from recipes.composition.world import World

TINY = ModelSize(num_blocks=1, num_heads=2, rope_axes=(8, 12, 12), text_width=64, vae_width=8)
CPU = torch.device("cpu")
REWARDS = np.array([[0.0, 1.0], [0.5, 0.5], [0.75, 0.25]])


@pytest.fixture(scope="module")
def base(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("base")
    pipeline = build_pipeline(TINY, words(world))
    pipeline.vae.register_to_config(latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    save(pipeline, folder)
    return folder


@pytest.fixture
def files(world: World, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of `samples`: a world of shapes, four prompts, and a judge that learned nothing."""
    monkeypatch.setattr(World, "small", lambda atlas=None: world)
    lines = prompt_lines(world, choose(world, 4, torch.Generator().manual_seed(1)))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.manual_seed(1)
    RewardJudge(Kind.of("reward", world)).save(tmp_path / "reward.safetensors")
    common = f"--model {base} --output {tmp_path}/tuned --world small --device cpu --steps 2 --batch 2"
    own = f"--prompts {tmp_path}/prompts.jsonl --per-prompt 2 --sampling-steps 2 --reward {tmp_path}/reward.safetensors"
    return f"{common} {own}".split()


def test_none_counts_all_alike() -> None:
    assert (weights_of(REWARDS, "none", 1.0) == 1).all()


def test_best_keeps_the_first_of_the_best() -> None:
    assert weights_of(REWARDS, "best", 1.0).tolist() == [[0, 1], [1, 0], [1, 0]]


@pytest.mark.parametrize("beta", [0.5, 1.0, 4.0])
def test_reward_weighs_by_the_exponential_of_the_advantage(beta: float) -> None:
    """Both pictures of a prompt lie one standard deviation from their mean: the better one's share is a sigmoid."""
    better = 2 / (1 + math.exp(-2 / beta))
    expected = np.array([[2 - better, better], [1.0, 1.0], [better, 2 - better]])
    np.testing.assert_allclose(weights_of(REWARDS, "reward", beta), expected, rtol=2e-3)  # a std is raised by 1e-4


def test_a_low_temperature_leaves_finite_weights() -> None:
    np.testing.assert_allclose(weights_of(REWARDS, "reward", 1e-4), np.array([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]]))


def test_a_pictures_loss_is_multiplied_by_its_weight(base: Path) -> None:
    """The untrained transformer gives zeros: a picture's loss is 1, of the noise, and the square of its latents."""
    assert first_loss(base, [0.5, 0.0]) == pytest.approx(0.25, rel=0.2)  # half of the batch has weight 0
    assert first_loss(base, [0.0, 0.5]) == pytest.approx(0.25 * (1 + 10**2), rel=0.2)


def first_loss(base: Path, weights: list[float]) -> float:
    """The loss on two pictures, of latents 0 and 10, before any of it is learned."""
    pipeline = load(base, CPU)
    latents = torch.tensor([0.0, 10.0])[:, None, None].expand(2, 16, 64)
    pictures = pictures_of(pipeline, latents, ["a cat", "a dog"], torch.float32)
    weighted = Pictures(pictures.latents, pictures.caption, pictures.embeddings, pictures.mask, torch.tensor(weights))
    torch.manual_seed(2)
    return train_transformer(pipeline, weighted, (4, 4), FlowRecipe(1, rate=1e-4, batch_size=256))[0].loss


def test_training_on_renders_lowers_the_flow_loss_of_others(world: World, base: Path) -> None:
    pipeline = load(base, CPU)
    before = flow_loss(pipeline, world)
    torch.manual_seed(3)
    shown = scenes_to_learn(pipeline, world, 64, 0.0, 1, CPU)
    train_transformer(pipeline, shown, grid_of(world), FlowRecipe(30, rate=3e-3, num_warmup=3, batch_size=16))
    assert flow_loss(pipeline, world) < 0.9 * before


def flow_loss(pipeline: Any, world: World) -> float:
    """The loss on scenes that training does not show: a step at a learning rate of zero."""
    others = scenes_to_learn(pipeline, world, 64, 0.0, 2, CPU)
    own = copy.copy(pipeline)
    own.transformer = copy.deepcopy(pipeline.transformer)
    torch.manual_seed(4)
    return train_transformer(own, others, grid_of(world), FlowRecipe(1, rate=0.0, batch_size=128))[0].loss


@pytest.mark.parametrize(("weight", "kept"), [("none", 8), ("best", 4), ("reward", 8)])
def test_own_pictures_tune_a_model(
    weight: str, kept: int, files: list[str], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["samples", *files, "--weight", weight])
    about = json.loads(capsys.readouterr().out)
    assert (about["made"], about["kept"], about["weight"]) == (8, kept, weight)
    assert about["seconds"].keys() == {"sampling", "judging", "encoding", "training", "compiling"}
    is_tuned(about, base)


def test_renders_tune_a_model_the_same_each_time(
    files: list[str], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["renders", *files[: files.index("--prompts")], "--pictures", "8"]
    handlers = logging.getLogger().handlers[:]
    main(options)
    about = json.loads(capsys.readouterr().out)
    assert about["made"] == 8
    assert about["seconds"].keys() == {"rendering", "training", "compiling"}
    is_tuned(about, base)
    main(options)
    assert json.loads(capsys.readouterr().out)["sha256"] == about["sha256"]
    # Other tests of this process read logs, and compare bits of attention.
    assert logging.getLogger().handlers == handlers
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


def is_tuned(about: dict[str, Any], base: Path) -> None:
    """The output loads, and differs from the base in the transformer alone."""
    folder = Path(about["output"])
    assert about["sha256"] == weights_hash(folder) != weights_hash(base)
    assert same_weights(folder, base, "vae")
    assert same_weights(folder, base, "text_encoder")
    image = load(folder, CPU)("a star", height=64, width=64, num_inference_steps=2, true_cfg_scale=1.0).images[0]
    assert image.size == (64, 64)


def same_weights(one: Path, other: Path, part: str) -> bool:
    first, second = (next((folder / part).glob("*.safetensors")).read_bytes() for folder in (one, other))
    return first == second


def test_speed_leaves_out_the_first_report() -> None:
    assert seconds_at_speed([Report(2, 1.0, 10.0), Report(2, 1.0, 1.0), Report(1, 1.0, 0.5)]) == 2.5
    assert seconds_at_speed([Report(2, 1.0, 10.0)]) == 10.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("samples --model a --output b --weight best", "--weight best needs a reward: give --reward"),
        ("samples --model a --output b --weight reward --reward j --per-prompt 1", "give --per-prompt 2 or more"),
        ("samples --model a --output b --guidance 0.5", "0.5 is below 1"),
        ("samples --model a --output b --beta 0", "0 is not above 0"),
        ("samples --model a --output a", "--output would overwrite the base: name another folder"),
        ("renders --model a --output b --steps 0", "0 is not at least 1"),
        ("renders --model a --output b --weight best", "unrecognized arguments: --weight best"),
    ],
)
def test_options_that_do_not_fit_are_named(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([*options.split(), "--world", "small"])
    assert message in capsys.readouterr().err


def test_the_held_out_judge_never_trains(world: World, tmp_path: Path) -> None:
    HeldoutJudge(Kind.of("heldout", world)).save(tmp_path / "heldout.safetensors")
    with pytest.raises(ValueError, match="held-out judge, which training must never see"):
        controls.reward_of(tmp_path / "heldout.safetensors", "cpu")
