"""Train the reward judge: `python -m recipes.composition.judges.train_reward --world small --output FILE`.

On renders, and in the medium world on labeled things too: see `things`. Fixed iterations and seeds: 7 minutes on ten
CPU cores for the small world; the others want a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from recipes.composition.backgrounds import grid
from recipes.composition.judges import things
from recipes.composition.judges.command import train_and_measure
from recipes.composition.judges.files import Kind
from recipes.composition.judges.networks.detector import BLANK, CELLS, FRAMES, Detector, cut_lines
from recipes.composition.judges.pixels import count_shades
from recipes.composition.judges.reward import RewardJudge
from recipes.composition.render import render
from recipes.composition.scenes import Scenes, World, draw
from recipes.composition.signs import lettering

SEED = 11
ITERATIONS = {64: 2500, 128: 3000}
BATCH = {64: 32, 128: 128}
READER_ITERATIONS = {64: 2500, 128: 2000}
READER_BATCH = 32
LR = 3e-3
MELTED_SHARE = 5
"""One picture in so many is melted, and shows nothing."""
TUNING = 0.12
"""Iterations with labeled things, for each of the others."""
TUNING_LR = 5e-4
NUM_RENDERS, NUM_LABELED = 16, 16
"""Pictures of a batch then."""
REFUSED_WEIGHT = 8.0
NUM_SHADE_SCENES = {64: 1024, 128: 4096}


def train(world: World, device: torch.device, iterations: int | None = None) -> RewardJudge:
    """A judge of this world. iterations: of the detector and of the reader, in place of each default."""
    torch.manual_seed(SEED)
    torch.backends.cudnn.deterministic = True
    generator = torch.Generator(device).manual_seed(SEED)
    judge = RewardJudge(Kind.of("reward", world), device)
    judge.gains = count_shades(world, NUM_SHADE_SCENES[world.size], generator)
    steps = iterations or ITERATIONS[world.size]
    optimizer, schedule = _optimizer(judge.detector, steps)
    judge.detector.train()
    for step in range(steps):
        scenes, pictures = _renders(world, BATCH[world.size], generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            heat, reach, style = judge.detector(pictures)
        loss = _losses(scenes, len(world.nouns), heat.float(), reach.float(), style.float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"detector {step + 1}: loss {loss.item():.3f}", flush=True)
    if (labeled := things.read_kept(things.REWARD, world, device)) is not None:
        tune(judge.detector, world, labeled, generator, max(1, round(TUNING * steps)))
    _train_reader(judge, world, generator, iterations or READER_ITERATIONS[world.size])
    return judge


def tune(
    detector: Detector, world: World, labeled: things.Labeled, generator: torch.Generator, iterations: int
) -> None:
    """Trains on renders, and on things that a model drew and people accepted or refused."""
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    optimizer = torch.optim.AdamW(detector.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TUNING_LR, total_steps=iterations, pct_start=0.1)
    num_nouns = len(world.nouns)
    for step in range(iterations):
        scenes, pictures = _renders(world, NUM_RENDERS, generator)
        drawn = labeled.drawn(NUM_LABELED, generator).varied(generator)
        heat, reach, style = detector(torch.cat([pictures, roughen(drawn.pictures, generator)]))
        loss = _losses(scenes, num_nouns, *(each[:NUM_RENDERS] for each in (heat, reach, style)))
        refused = _bumps(drawn.boxes, torch.where(drawn.refused, 0, -1), 1)
        loss = loss + _focal(
            heat[NUM_RENDERS:], _bumps(drawn.boxes, drawn.nouns, num_nouns + 1), 1 + REFUSED_WEIGHT * refused
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"labeled, {step + 1}: loss {loss.item():.3f}", flush=True)


def _renders(world: World, num: int, generator: torch.Generator) -> tuple[Scenes, torch.Tensor]:
    """Scenes and roughened pictures (num, 3, S, S) of them, of which some are melted and show nothing."""
    scenes = draw(world, num, generator, split="any")
    pictures = render(world, scenes, generator.device)
    num_melted = num // MELTED_SHARE
    pictures[:num_melted] = melt(scenes.pick(slice(0, num_melted)), pictures[:num_melted], generator)
    scenes.boxes[:num_melted], scenes.sign[:num_melted] = 0, 0
    scenes.styles[:num_melted] = -1
    return scenes, roughen(pictures, generator)


def roughen(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures a little blurred and noisy, each by another measure, as painted ones are."""
    numbers = torch.rand(2, len(pictures), 1, 1, 1, generator=generator, device=pictures.device)
    blurred = F.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    noise = torch.randn(pictures.shape, generator=generator, device=pictures.device)
    share = (numbers[0] - 0.4).clamp(min=0)
    return (pictures + share * (blurred - pictures) + 0.05 * numbers[1] ** 2 * noise).clamp(0, 1)


def melt(scenes: Scenes, pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures whose things are bent until they are nothing: what a model paints that has not learned their shapes.

    Each pixel is taken from a place that is moved by smooth noise, by a quarter of the things' size.
    """
    device = pictures.device
    sizes = (scenes.sizes.sum(1) / scenes.count.clamp(min=1)).clamp(min=0.2)[:, None, None, None]
    fine, coarse = (
        F.interpolate(
            torch.randn(len(pictures), 2, n, n, generator=generator, device=device), pictures.shape[2:], mode="bicubic"
        )
        for n in (8, 4)
    )
    moved = sizes * torch.where(sizes < 0.4, fine, coarse)
    points = 2 * grid(pictures.shape[-1], device) - 1 + 0.5 * moved.permute(0, 2, 3, 1)
    return F.grid_sample(pictures, points, mode="bilinear", padding_mode="reflection", align_corners=False)


def _losses(
    scenes: Scenes, num_nouns: int, heat: torch.Tensor, reach: torch.Tensor, style: torch.Tensor
) -> torch.Tensor:
    boxes = torch.cat([scenes.boxes, scenes.sign[:, None]], 1)
    nouns = torch.cat([scenes.nouns, torch.full_like(scenes.nouns[:, :1], num_nouns)], 1)
    owner, slot = ((boxes[..., 2] > 0) & (nouns >= 0)).nonzero(as_tuple=True)
    box = boxes[owner, slot]
    cell = _cells(box)
    focal = _focal(heat, _bumps(boxes, nouns, num_nouns + 1))
    to = torch.cat([(cell + 0.5) / CELLS - box[:, :2], box[:, 2:] - (cell + 0.5) / CELLS], 1).clamp(min=0.004)
    sides = F.smooth_l1_loss(reach[owner, :, cell[:, 1], cell[:, 0]], to.log(), beta=0.1)
    styles = F.cross_entropy(style, scenes.styles[:, 0], ignore_index=-1)
    return focal + 2 * sides + 0.5 * styles


def _bumps(boxes: torch.Tensor, kinds: torch.Tensor, num_kinds: int) -> torch.Tensor:
    """Wanted heat (N, num_kinds, CELLS, CELLS) of boxes (N, M, 4) in edges: 1 in the middle of one of a kind (N, M),
    less around it. Boxes without width and kinds below 0 are ignored."""
    owner, slot = ((boxes[..., 2] > 0) & (kinds >= 0)).nonzero(as_tuple=True)
    box, kind = boxes[owner, slot], kinds[owner, slot]
    at, cell = torch.arange(CELLS, device=boxes.device), _cells(box)
    spread = ((box[:, 2:] - box[:, :2]) * CELLS / 5).clamp(min=0.5)
    across, down = (torch.exp(-((at - cell[:, axis, None]) ** 2) / (2 * spread[:, axis, None] ** 2)) for axis in (0, 1))
    bumps = down[:, :, None] * across[:, None, :]
    heat = torch.zeros(len(boxes), num_kinds, CELLS, CELLS, device=boxes.device)
    for number in range(boxes.shape[1]):  # two of a noun in one picture are never in the same slot
        own = slot == number
        heat[owner[own], kind[own]] = torch.maximum(heat[owner[own], kind[own]], bumps[own])
    return heat


def _cells(boxes: torch.Tensor) -> torch.Tensor:
    """(B, 2) int64: column and row of the middles of boxes (B, 4) in edges."""
    return ((boxes[:, :2] + boxes[:, 2:]) / 2 * CELLS).long().clamp(0, CELLS - 1)


def _focal(heat: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """CenterNet's loss of logits, by the number of cells in whose middle a thing is, at least 1."""
    positive = target == 1
    p = heat.sigmoid().clamp(1e-4, 1 - 1e-4)
    gain = torch.where(positive, (1 - p) ** 2 * p.log(), (1 - target) ** 4 * p**2 * (1 - p).log())
    return -(gain * weight).sum() / positive.sum().clamp(min=1)


def _train_reader(judge: RewardJudge, world: World, generator: torch.Generator, steps: int) -> None:
    optimizer, schedule = _optimizer(judge.reader, steps)
    judge.reader.train()
    for step in range(steps):
        scenes = draw(world, READER_BATCH, generator, split="any", categories=["text"])
        pictures = roughen(render(world, scenes, judge.device), generator)
        boxes = scenes.sign + 0.015 * torch.randn(scenes.sign.shape, generator=generator, device=judge.device)
        logits = judge.reader(cut_lines(pictures, boxes))
        loss = F.cross_entropy(logits.flatten(0, 1), _frames(world, scenes, boxes).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"reader {step + 1}: loss {loss.item():.3f}", flush=True)


def _frames(world: World, scenes: Scenes, boxes: torch.Tensor) -> torch.Tensor:
    """(N, FRAMES) int64: 1 + the letter in whose middle each frame of a box is, or `BLANK`."""
    at = lettering(world, scenes)
    share = (torch.arange(FRAMES, device=boxes.device) + 0.5) / FRAMES
    x = boxes[:, :1] + (boxes[:, 2:3] - boxes[:, :1]) * share
    inside = (x[:, :, None] - at.middles[:, None]).abs() < 0.3 * at.widths[:, None]
    return torch.where(inside, scenes.word[:, None] + 1, BLANK).amax(2)


def _optimizer(
    module: torch.nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.02)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.1)


def main() -> None:
    train_and_measure(__doc__, train)


if __name__ == "__main__":
    main()
