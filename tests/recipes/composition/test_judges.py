"""The judges' parts against what they are meant to compute, their files, and the sheets of labels."""

import ast
import csv
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from flowfleet.rewards.gradients import PixelInput
from recipes.composition.captions import prompt_lines
from recipes.composition.judges import labels, service
from recipes.composition.judges.files import Kind, read
from recipes.composition.judges.findings import COMPONENTS, Thing, answer
from recipes.composition.judges.heldout import HeldoutJudge, _inner, _spell, _without_doubles
from recipes.composition.judges.loading import load_judge
from recipes.composition.judges.networks.detector import CELLS, FRAMES, LINE, cut_lines, spell_out
from recipes.composition.judges.networks.lite import Lite, SameConv, pretrained
from recipes.composition.judges.pixels import BINS, count_shades, shade_of, vote
from recipes.composition.judges.reward import FILLED, THRESHOLD, RewardJudge
from recipes.composition.judges.train_heldout import bend
from recipes.composition.judges.train_reward import _frames, melt
from recipes.composition.make_prompts import read_lines
from recipes.composition.render import coverage, render
from recipes.composition.scenes import World, draw
from services.reward import scorers
from services.reward.scorer import Problem, Sample, Score, ScoreGradient
from services.reward.scorers.differentiable.own_function import DifferentiableFunction
from services.reward.scorers.python_function import PythonFunction

PACKAGE = "recipes.composition.judges."
JUDGES = Path(service.__file__).parent


@pytest.fixture(scope="module")
def pair(world: World) -> tuple[RewardJudge, HeldoutJudge]:
    """Untrained judges."""
    torch.manual_seed(0)
    return RewardJudge(Kind.of("reward", world)), HeldoutJudge(Kind.of("heldout", world))


def reached(module: str) -> set[str]:
    """Modules of the judges that a module imports, itself or through others."""
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        tree = ast.parse((JUDGES / f"{name.replace('.', '/')}.py").read_text())
        sources = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        here = {source.removeprefix(PACKAGE) for source in sources if source.startswith(PACKAGE)} - found
        found |= here
        todo += here
    return found


def test_the_two_judges_share_what_findings_and_files_are_and_no_network() -> None:
    assert reached("reward") & reached("heldout") == {"files", "findings"}
    assert {"networks.detector", "pixels"} <= reached("reward")
    assert "networks.lite" in reached("heldout")


@pytest.mark.parametrize("index", [0, 1])
def test_a_file_gives_the_same_findings_to_half_precision(
    pair: tuple[RewardJudge, HeldoutJudge], world: World, tmp_path: Path, index: int
) -> None:
    judge = pair[index]
    judge.save(tmp_path / "judge.safetensors")
    again = load_judge(tmp_path / "judge.safetensors")
    assert (type(again), again.kind) == (type(judge), judge.kind)
    pictures = render(world, draw(world, 3, torch.Generator().manual_seed(1)), "cpu")
    nets = [(one.detector if isinstance(one, RewardJudge) else one.cells) for one in (judge, again)]
    for net in (judge, again):
        net.look(pictures)  # which turns training off
    with torch.no_grad():
        for before, after in zip(*(net(pictures) for net in nets), strict=True):
            assert torch.allclose(before, after, atol=0.02 * before.abs().max().item())


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file: train a judge"):
        read(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a judge"):
        read(tmp_path / "other.safetensors")


def test_pixels_vote_for_the_color_of_a_thing(world: World) -> None:
    """On true boxes: the table alone is right, without any network."""
    gains = count_shades(world, 512, torch.Generator().manual_seed(1))
    scenes = draw(world, 200, torch.Generator().manual_seed(2), categories=["color_attr"])
    shades = shade_of(render(world, scenes, "cpu"))
    for slot in (0, 1):
        said = vote(gains, shades, scenes.boxes[:, slot] * world.size)
        assert (said == scenes.colors[:, slot]).float().mean() >= 0.98


def test_where_no_pixel_speaks_for_a_color_there_is_none() -> None:
    gains = torch.zeros(2, BINS**3)
    gains[1, 7] = 1.0
    shades = torch.zeros(2, 4, 4, dtype=torch.long)
    shades[1, 0, 0] = 7
    assert vote(gains, shades, torch.tensor([[0.0, 0.0, 4.0, 4.0]] * 2)).tolist() == [-1, 1]


def test_shades_are_numbered_by_red_green_and_blue() -> None:
    pictures = torch.tensor([1.0, 0.5, 0.0]).view(1, 3, 1, 1)
    assert shade_of(pictures).item() == 15 * BINS**2 + 8 * BINS


def test_a_line_is_what_is_in_the_box(world: World) -> None:
    pictures = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    box = torch.tensor([[0.25, 0.5, 0.75, 1.0]])
    part = F.interpolate(pictures[:, :, 32:, 16:48], LINE, mode="bilinear", align_corners=False)
    inner = (slice(None), slice(None), slice(2, -2), slice(4, -4))  # at the edges the line sees what is around
    assert torch.allclose(cut_lines(pictures, box)[inner], part[inner], atol=1e-5)


def test_each_run_of_frames_is_a_letter(world: World) -> None:
    logits = torch.full((1, FRAMES, 27), -5.0)
    for frame, letter in enumerate([0, 3, 3, 0, 0, 1, 2, 2, 0, 20, 0, 20]):
        logits[0, frame, letter] = 5.0
    logits[0, 12:, 0] = 5.0
    assert spell_out(logits) == ["CBTT"]  # the third run is mostly a B
    scenes = draw(world, 50, torch.Generator().manual_seed(1), categories=["text"])
    frames = _frames(world, scenes, scenes.sign)
    words = [line["metadata"]["word"] for line in prompt_lines(world, scenes)]
    assert spell_out(F.one_hot(frames, 27).float() * 10) == words


def test_the_held_out_judge_spells_by_the_best_path() -> None:
    frames = F.one_hot(torch.tensor([0, 11, 11, 0, 1, 0, 1, 20]), 27).float().numpy()
    assert _spell(frames) == "KAAT"
    assert _inner((10.0, 10.0, 60.0, 30.0)) == (13, 11, 57, 29)


def test_doubles_are_left_out_whatever_they_are_called() -> None:
    cat = (Thing("cat", (0.0, 0.0, 20.0, 20.0), 0.6, "red"), 0)
    dog = (Thing("dog", (1.0, 0.0, 20.0, 20.0), 0.9, "red"), 1)
    far = (Thing("cat", (40.0, 40.0, 60.0, 60.0), 0.7, "red"), 0)
    half = (Thing("dog", (8.0, 8.0, 14.0, 13.0), 0.5, "red"), 1)  # a part of the dog, taken for a second one
    near = (Thing("dog", (16.0, 0.0, 36.0, 20.0), 0.5, "red"), 1)
    assert _without_doubles([cat, dog, far, half, near]) == [dog, far, near]


def test_padding_is_that_of_tensorflow() -> None:
    """At stride 2 an even edge is padded at its end alone: a kernel's first place is the picture's first pixel."""
    layer = SameConv(1, 1, 3, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    layer.weight.data[0, 0, 0, 0] = 1
    picture = torch.arange(16.0).view(1, 1, 4, 4)
    assert layer(picture).flatten().tolist() == [0, 2, 8, 10]
    assert [tuple(each.shape[1:]) for each in Lite().eval()(torch.zeros(1, 3, 64, 64))] == [
        (24, 16, 16),
        (40, 8, 8),
        (112, 4, 4),
    ]


def test_layers_see_what_the_statistics_kept_from_their_training_say(world: World) -> None:
    """Channel means before batch norms: of renders they are as of ImageNet's pictures, which another order of channels,
    padding or scale would spoil."""
    net = pretrained().eval()
    seen: list[torch.Tensor] = []
    for norm in [module for name, module in net.named_modules() if name.endswith("_bn1")][:5]:
        norm.register_forward_hook(
            lambda norm, inputs, output: seen.append(
                torch.corrcoef(torch.stack([inputs[0].mean((0, 2, 3)), norm.running_mean]))[0, 1]
            )
        )
    with torch.no_grad():
        net(render(world, draw(world, 32, torch.Generator().manual_seed(1)), "cpu"))
    assert min(seen) > 0.85


@pytest.mark.parametrize(
    ("edge", "there", "wanted"),
    [(64, (64, 128), 64), (128, (64, 128), 128), (192, (64, 128), 64), (256, (64, 128), 128), (128, (64,), 64)],
)
def test_pictures_go_to_the_judge_of_the_largest_size_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edge: int, there: tuple[int, ...], wanted: int
) -> None:
    monkeypatch.setenv(service.FOLDER, str(tmp_path))
    for size in there:
        (tmp_path / f"reward-{size}.safetensors").touch()

    class Seen:
        kind = Kind("reward", wanted, (), (), ())

        def look(self, pictures: torch.Tensor) -> list[tuple[int, ...]]:
            return [tuple(pictures.shape)]

    monkeypatch.setattr(service, "judge_of", lambda name, size: Seen() if size == wanted else None)
    assert service.look("reward", torch.zeros(2, 3, edge, edge)) == [(2, 3, wanted, wanted)]
    with pytest.raises(ValueError, match="squares of a multiple of 64"):
        service.look("reward", torch.zeros(1, 3, 100, 100))


def test_sheets_ask_for_labels_of_every_category(world: World, tmp_path: Path) -> None:
    scenes = draw(world, 96, torch.Generator().manual_seed(1))
    lines = prompt_lines(world, scenes)
    labels.save(tmp_path / "pictures", render(world, scenes, "cpu"), lines)
    labels.write_sheets(tmp_path / "pictures", tmp_path / "labels", 32)
    with (tmp_path / "labels" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 32
    assert {row["category"] for row in rows} == {line["metadata"]["tag"] for line in lines}
    assert len(list((tmp_path / "labels").glob("sheet-*.png"))) == math.ceil(32 / (labels.COLUMNS * labels.ROWS))
    with pytest.raises(ValueError, match="write yes or no"):
        labels.read_labels(tmp_path / "labels" / "labels.csv")
    pictures = labels.read(tmp_path / "pictures", [3, 5])
    assert torch.allclose(pictures, render(world, scenes.pick([3, 5]), "cpu"), atol=0.5 / 255 + 1e-6)


def test_agreement_with_labels_is_counted_by_category() -> None:
    lines = [{"metadata": {"tag": "colors"}}] * 3 + [{"metadata": {"tag": "text"}}]
    said = labels.agreement({0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}, lines)
    assert "| colors | 3 | 2 | 3 | 0.667 |" in said
    assert "| text | 1 | 0 | 0 | 1.000 |" in said
    assert "| all | 4 | 2 | 3 | 0.750 |" in said


def test_a_judge_refuses_prompts_of_another_world() -> None:
    (line,) = read_lines(Path("recipes/composition/prompts/full_seen.jsonl"))[:1]
    with pytest.raises(
        ValueError, match=r"for pictures of 64 pixels knows no \w+: name the folder .*COMPOSITION_JUDGES"
    ):
        service.heldout([Image.new("RGB", (128, 128))], [line["prompt"]], [line["metadata"]])


def test_settings_of_the_services_are_taken_by_the_scorer() -> None:
    for name in ("reward", "heldout"):
        path = Path(service.__file__).parent / f"{name}.toml"
        settings = tomllib.loads(path.read_text())
        scorer = scorers.make("python", settings, 1)
        assert scorer.components == COMPONENTS
        assert scorer.parse({"score": "strict"}) == (("score", "strict"),)


@pytest.mark.parametrize("ruin", [melt, bend])
def test_ruined_pictures_keep_their_colors_and_lose_their_shapes(
    world: World, ruin: Callable[..., torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(2)
    scenes = draw(world, 64, generator, categories=["single_object", "counting"])
    pictures = render(world, scenes, "cpu")
    ruined = ruin(scenes, pictures, generator)
    assert ruined.shape == pictures.shape
    assert (ruined.mean((2, 3)) - pictures.mean((2, 3))).abs().mean() < 0.05
    cover = coverage(world, scenes).amax(1, keepdim=True) > 0.9
    bared = (ruined - pictures).abs().amax(1, keepdim=True)[cover] > 0.1
    assert bared.float().mean() > 0.2  # of the things' pixels: shapes of one color change at their rims alone


def test_the_scorer_scores_pictures_by_their_metadata(
    pair: tuple[RewardJudge, HeldoutJudge], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses an untrained judge, whose answers are those that `look` and `answer` give."""
    pair[0].save(tmp_path / "reward-64.safetensors")
    monkeypatch.setenv(service.FOLDER, str(tmp_path))
    service.judge_of.cache_clear()
    scorer = scorers.make("python", tomllib.loads((Path(service.__file__).parent / "reward.toml").read_text()), 1)
    assert isinstance(scorer, PythonFunction)
    scorer.start()
    scenes = draw(world, 6, torch.Generator().manual_seed(1))
    pixels = (render(world, scenes, "cpu").permute(0, 2, 3, 1) * 255).round().byte().numpy()
    lines = prompt_lines(world, scenes)
    samples = [Sample(one[None], line["prompt"], line["metadata"]) for one, line in zip(pixels, lines, strict=True)]
    found = service.look("reward", torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    for outcome, findings, line in zip(scorer.score(samples, ()), found, lines, strict=True):
        said = answer(findings, line["metadata"])
        assert isinstance(outcome, Score)
        assert outcome.value == said["score"]
        assert {"score": outcome.value, **outcome.components} == said
    wrong = Sample(pixels[0][None], "a cat", {"tag": "colors"})
    first, second = scorer.score([samples[0], wrong], ())
    assert first == scorer.score(samples[:1], ())[0]
    assert isinstance(second, Problem)
    assert "ValueError: metadata.geneval is missing" in second.message
    service.judge_of.cache_clear()


ASKED = ["single_object", "two_object", "counting", "colors", "position", "color_attr", "style"]


def asked(world: World, category: str, count: int = 4) -> tuple[torch.Tensor, list[dict[str, str]]]:
    """Renders, and the metadata of another render's prompt for each: what it lacks."""
    scenes = draw(world, count, torch.Generator().manual_seed(3), categories=[category])
    metadata = [line["metadata"] for line in prompt_lines(world, scenes)]
    return render(world, scenes, "cpu"), metadata[1:] + metadata[:1]


def shipped() -> RewardJudge:
    judge = load_judge(service.WEIGHTS / "reward-64.safetensors")
    assert isinstance(judge, RewardJudge)
    return judge


@pytest.mark.parametrize("category", ASKED)
def test_the_smooth_score_rises_as_its_gradient_says(world: World, category: str) -> None:
    """Differences are taken in float64, along the gradient and along a random direction."""
    judge = shipped()
    pictures, metadata = asked(world, category)
    single = pictures.clone().requires_grad_()
    (slope,) = torch.autograd.grad(judge.smooth(single, metadata).sum(), single)
    judge.detector.double()
    exact = pictures.double().requires_grad_()
    score = judge.smooth(exact, metadata).sum()
    (gradient,) = torch.autograd.grad(score, exact)
    assert torch.allclose(slope.double(), gradient, atol=1e-3 * gradient.abs().max().item())
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for way in (gradient, noise):
        way = way / way.norm() * 1e-6
        with torch.no_grad():
            rise = judge.smooth(exact + way, metadata).sum() - judge.smooth(exact - way, metadata).sum()
        assert rise.item() / 2 == pytest.approx((gradient * way).sum().item(), rel=1e-3, abs=1e-12)
    step = 0.5 / gradient.norm()
    with torch.no_grad():
        assert judge.smooth((exact + step * gradient).clamp(0, 1), metadata).sum() > score


def test_pixels_that_follow_the_smooth_score_please_the_hard_one(world: World) -> None:
    """Fifty steps on renders of something else: the two scores of one network rise together."""
    judge = shipped()
    pictures, metadata = asked(world, "two_object", 8)

    def hard() -> float:
        found = judge.look(pictures.detach())
        return sum(answer(one, asks)["score"] for one, asks in zip(found, metadata, strict=True)) / len(metadata)

    before = hard()
    pictures.requires_grad_()
    optimizer = torch.optim.Adam([pictures], 0.02, maximize=True)
    scores = []
    for _ in range(50):
        score = judge.smooth(pictures, metadata).mean()
        scores.append(score.item())
        (pictures.grad,) = torch.autograd.grad(score, pictures)
        optimizer.step()
        with torch.no_grad():
            pictures.clamp_(0, 1)
    assert scores[-1] > scores[0] + 0.3
    assert hard() > before + 0.3


def seen(peaks: dict[tuple[int, int, int], float], nouns: int = 11) -> torch.Tensor:
    """A heat map (nouns, C, C) with certainties, 1/2 at the threshold, at (noun, row, column), and none elsewhere."""
    heat = torch.full((nouns, CELLS, CELLS), -40.0)
    for place, sure in peaks.items():
        heat[place] = math.log(sure / (1 - sure)) + math.log(THRESHOLD / (1 - THRESHOLD))
    return heat


@pytest.mark.parametrize(
    ("peaks", "request_", "more", "score"),
    [
        ({(0, 2, 2): 0.8}, [(0, 1)], {}, 0.8),
        ({}, [(0, 1)], {}, 0.0),
        ({(0, 2, 2): 0.8, (0, 9, 9): 0.6}, [(0, 2)], {}, 0.7),
        ({(0, 2, 2): 0.8, (0, 9, 9): 0.6}, [(0, 1)], {}, 0.8 * 0.4),
        ({(0, 2, 2): 0.8, (0, 2, 3): 0.6}, [(0, 1)], {}, 0.8),  # next to a peak there is none
        ({(0, 2, 2): 0.8, (1, 9, 9): 0.4}, [(0, 1), (1, 1)], {}, 0.6),
        ({(0, 2, 2): 0.8}, [(0, 1)], {"style": "flat"}, (0.8 + 0.1) / 2),
        ({(0, 2, 2): 0.8}, [(0, 1, "red")], {}, (0.8 + 0.8 * 0.75) / 2),
        ({(0, 2, 2): 0.8, (1, 2, 9): 0.5}, [(0, 1), (1, 1, ("right of", 0))], {}, (0.8 + 0.5 + 0.4) / 3),
        ({(0, 2, 2): 0.8, (1, 2, 9): 0.5}, [(0, 1), (1, 1, ("above", 0))], {}, (0.8 + 0.5 + 0.2) / 3),
        ({(0, 2, 2): 0.8, (1, 2, 9): 0.5}, [(0, 1), (1, 1, ("left of", 0))], {}, (0.8 + 0.5 + 0.0) / 3),
    ],
)
def test_the_smooth_score_is_the_mean_of_its_formulas(
    pair: tuple[RewardJudge, HeldoutJudge],
    peaks: dict[tuple[int, int, int], float],
    request_: list[Any],
    more: dict[str, str],
    score: float,
) -> None:
    judge = pair[0]
    include = []
    for noun, count, *rest in request_:
        asks = {"class": judge.kind.nouns[noun], "count": count}
        include.append(asks | {"color" if isinstance(one, str) else "position": one for one in rest})
    metadata = {"geneval": json.dumps({"include": include}), **more}
    styles = torch.full((3,), 0.45)
    styles[judge.kind.styles.index("flat")] = 0.1
    shares = torch.full((10,), 0.25 / 9)
    shares[judge.kind.colors.index("red")] = 0.75
    votes = (shares.log() * FILLED)[:, None, None].expand(-1, 64, 64)
    found = judge._smooth(seen(peaks), torch.full((4, CELLS, CELLS), 0.1), styles, votes, metadata)
    assert found.item() == pytest.approx(score, abs=1e-3)


def test_what_has_no_smooth_score_is_named(pair: tuple[RewardJudge, HeldoutJudge]) -> None:
    asks = {"geneval": '{"include": [{"class": "apple", "count": 1}]}', "word": "CAT"}
    with pytest.raises(ValueError, match="words have no smooth score"):
        pair[0].smooth(torch.zeros(1, 3, 64, 64), [asks])
    one = {"geneval": '{"include": [{"class": "apple", "count": 1}]}'}
    for unknown, asks in {
        "zebra": {"geneval": '{"include": [{"class": "zebra", "count": 1}]}'},
        "oil": one | {"style": "oil"},
    }.items():
        with pytest.raises(ValueError, match=f"ask for {unknown}, and this judge knows"):
            pair[0].smooth(torch.zeros(1, 3, 64, 64), [asks])


def test_the_scorer_gives_the_smooth_scores_gradient(world: World) -> None:
    settings = tomllib.loads((JUDGES / "reward_gradient.toml").read_text())
    scorer = scorers.make("python", settings, 1)
    assert isinstance(scorer, DifferentiableFunction)
    scorer.start()
    pictures, metadata = asked(world, "color_attr")
    given = [PixelInput(one.numpy(), "", asks) for one, asks in zip(pictures, metadata, strict=True)]
    pictures = pictures.clone().requires_grad_()
    scores = service.smooth(pictures, [""] * 4, metadata)
    (gradients,) = torch.autograd.grad(scores.sum(), pictures)
    for outcome, score, gradient in zip(scorer.score_with_gradient(given, ()), scores, gradients, strict=True):
        assert isinstance(outcome, ScoreGradient)
        assert outcome.value == pytest.approx(score.item())
        assert outcome.gradient == pytest.approx(gradient.numpy(), abs=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_a_judge_refuses_pictures_of_another_world(pair: tuple[RewardJudge, HeldoutJudge], which: int) -> None:
    with pytest.raises(ValueError, match="looks at pictures of 64×64 pixels, these have 128×128"):
        pair[which].look(torch.zeros(1, 3, 128, 128))


def test_a_service_without_its_judge_says_how_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(service.FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match=r"--world full --output .*heldout-128.safetensors.*--world medium"):
        service.judge_of("heldout", 128)
    with pytest.raises(ValueError, match=r"train_heldout --world small --output .*heldout-64.safetensors"):
        service.heldout.start()
