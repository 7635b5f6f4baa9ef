"""Train the held-out judge: `python -m recipes.composition.judges.train_heldout --world small --output FILE`.

Other seeds, another roughening and another loss than the reward's, and labeled things: see `things`. On an H200 in
three minutes for the small world, in five for the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from recipes.composition.backgrounds import grid
from recipes.composition.judges import things
from recipes.composition.judges.command import train_and_measure
from recipes.composition.judges.files import Kind
from recipes.composition.judges.heldout import CELLS, HeldoutJudge
from recipes.composition.judges.networks.lite import pretrained
from recipes.composition.render import render
from recipes.composition.scenes import Scenes, World, draw

SEED = 7_000_003
ITERATIONS = {64: 2500, 128: 3000}
BATCH = {64: 64, 128: 128}
LR = 2e-3
FEATURES_LR = 3e-4
TUNING = 0.12
"""Iterations with labeled things, for each of the others."""
TUNING_LR = 5e-4
NUM_RENDERS, NUM_LABELED = 8, 16
"""Pictures of a batch then."""
REFUSED_WEIGHT = 0.3
BENT_SHARE = 6
"""One picture in so many is bent out of shape, and shows nothing."""
NUM_WAVES = 4
INNER = 0.5
"""A cell is in the middle of a thing if it lies in so much of its box's width and height."""


def train(world: World, device: torch.device, iterations: int | None = None) -> HeldoutJudge:
    """A judge of this world. iterations: in place of the default."""
    torch.manual_seed(SEED)
    torch.backends.cudnn.deterministic = True
    generator = torch.Generator(device).manual_seed(SEED)
    judge = HeldoutJudge(Kind.of("heldout", world), device)
    judge.features.load_state_dict(pretrained().state_dict())
    judge.features.eval()  # its means and variances stay
    judge.head.train()
    groups: list[dict[str, Any]] = [
        {"params": list(judge.head.parameters()), "lr": LR},
        {"params": list(judge.features.parameters()), "lr": FEATURES_LR},
    ]
    labeled = things.read_kept(things.HELDOUT, world, device)
    assert labeled is not None
    steps = iterations or ITERATIONS[world.size]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=steps, pct_start=0.1
    )
    for step in range(steps):
        scenes, pictures = _renders(world, BATCH[world.size], generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            said = judge.cells(pictures)
        loss = _loss(scenes, [each.float() for each in said])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{step + 1}: loss {loss.item():.3f}", flush=True)
    tune(judge, world, labeled, generator, max(1, round(TUNING * steps)))
    return judge


def tune(
    judge: HeldoutJudge, world: World, labeled: things.Labeled, generator: torch.Generator, iterations: int
) -> None:
    """Trains the head on renders, and on things that a model drew and people accepted or refused."""
    judge.features.requires_grad_(False)
    for module in judge.head.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    optimizer = torch.optim.AdamW(judge.head.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TUNING_LR, total_steps=iterations, pct_start=0.1)
    for step in range(iterations):
        scenes, pictures = _renders(world, NUM_RENDERS, generator)
        drawn = labeled.drawn(NUM_LABELED, generator)
        said = judge.cells(torch.cat([pictures, disturb(drawn.pictures, generator)]))
        loss = _loss(scenes, [each[:NUM_RENDERS] for each in said]) + _labeled_loss(drawn, said[0][NUM_RENDERS:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"labeled, {step + 1}: loss {loss.item():.3f}", flush=True)


def _renders(world: World, num: int, generator: torch.Generator) -> tuple[Scenes, torch.Tensor]:
    """Scenes and disturbed pictures (num, 3, S, S) of them, of which some are bent and show nothing."""
    scenes = draw(world, num, generator, split="any")
    pictures = render(world, scenes, generator.device)
    num_bent = num // BENT_SHARE
    pictures[:num_bent] = bend(scenes.pick(slice(0, num_bent)), pictures[:num_bent], generator)
    scenes.boxes[:num_bent], scenes.sign[:num_bent] = 0, 0
    return scenes, disturb(pictures, generator)


def _labeled_loss(drawn: things.Labeled, nouns: torch.Tensor) -> torch.Tensor:
    """Cross entropies over cells inside of things, inside of what was refused, and elsewhere."""
    inside = middles(drawn.boxes)
    target = ((drawn.nouns + 1)[..., None, None] * inside).amax(1)
    is_refused = (inside & drawn.refused[..., None, None]).any(1)
    entropy = F.cross_entropy(nouns, target, reduction="none")
    is_thing, elsewhere = target > 0, (target == 0) & ~is_refused
    refused = (entropy * is_refused).sum() / is_refused.sum().clamp(min=1)
    thing = (entropy * is_thing).sum() / is_thing.sum().clamp(min=1)
    return thing + REFUSED_WEIGHT * refused + entropy[elsewhere].mean()


def middles(boxes: torch.Tensor) -> torch.Tensor:
    """(N, M, CELLS, CELLS) bool: which cells are in the middle of boxes (N, M, 4), which are in edges."""
    at = (torch.arange(CELLS, device=boxes.device) + 0.5) / CELLS
    middle, half = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) * INNER / 2
    half = torch.where(half > 0, half.clamp(min=0.55 / CELLS), -1.0)
    across, down = ((at - middle[..., axis, None]).abs() <= half[..., axis, None] for axis in (0, 1))
    return down[..., :, None] & across[..., None, :]


def bend(scenes: Scenes, pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures through `NUM_WAVES` waves in random directions, of lengths and heights that ruin the things' shapes."""
    device = pictures.device
    sizes = (scenes.sizes.sum(1) / scenes.count.clamp(min=1)).clamp(min=0.2)[:, None, None]
    points = grid(pictures.shape[-1], device)
    moved = torch.zeros(len(pictures), *points.shape, device=device)
    for numbers in torch.rand(NUM_WAVES, 4, len(pictures), 1, 1, generator=generator, device=device):
        along, across, phase = 2 * torch.pi * numbers[0], 2 * torch.pi * numbers[1], 2 * torch.pi * numbers[2]
        wave = torch.sin(
            2 * torch.pi * (0.8 + numbers[3]) / sizes * (points[..., 0] * along.cos() + points[..., 1] * along.sin())
            + phase
        )
        moved += 0.13 * (sizes * wave)[..., None] * torch.stack([across.cos(), across.sin()], -1)
    return F.grid_sample(pictures, 2 * (points + moved) - 1, padding_mode="border", align_corners=False)


def disturb(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Pictures of other brightness and contrast, a third of them halved in resolution, with noise of one level."""
    numbers = torch.rand(3, len(pictures), 1, 1, 1, generator=generator, device=pictures.device)
    edge = pictures.shape[-1]
    coarse = F.interpolate(F.avg_pool2d(pictures, 2), (edge, edge), mode="bilinear", align_corners=False)
    pictures = torch.where(numbers[0] < 1 / 3, 0.5 * (pictures + coarse), pictures)
    pictures = 0.5 + (pictures - 0.5) * (0.92 + 0.16 * numbers[1]) + 0.08 * (numbers[2] - 0.5)
    return (pictures + 0.015 * torch.randn(pictures.shape, generator=generator, device=pictures.device)).clamp(0, 1)


def _loss(scenes: Scenes, said: list[torch.Tensor]) -> torch.Tensor:
    """Cross entropies of nouns over all cells, of styles and colors over cells inside of things, and 1 − GIoU of the
    boxes there."""
    nouns, reach, styles, colors = said
    device = nouns.device
    boxes = torch.cat([scenes.boxes, scenes.sign[:, None]], 1)
    kinds = torch.cat([scenes.nouns, torch.full_like(scenes.nouns[:, :1], nouns.shape[1] - 2)], 1)
    at = (torch.arange(CELLS, device=device) + 0.5) / CELLS
    owner, slot, row, column = middles(boxes).nonzero(as_tuple=True)
    target = torch.zeros(len(nouns), CELLS, CELLS, dtype=torch.long, device=device)
    target[owner, row, column] = kinds[owner, slot] + 1
    is_thing = target > 0
    entropy = F.cross_entropy(nouns, target, reduction="none")
    loss = entropy[is_thing].mean() + 2 * entropy[~is_thing].mean()

    box, cell = boxes[owner, slot], torch.stack([at[column], at[row]], 1)
    wanted = torch.cat([cell - box[:, :2], box[:, 2:] - cell], 1).clamp(min=1e-3)
    given = reach[owner, :, row, column].clamp(-8, 2).exp()
    least, most = torch.minimum(wanted, given), torch.maximum(wanted, given)
    shared = (least[:, 0] + least[:, 2]) * (least[:, 1] + least[:, 3])
    union = _area(wanted) + _area(given) - shared
    around = (most[:, 0] + most[:, 2]) * (most[:, 1] + most[:, 3])
    loss = loss + (1 - shared / union + (around - union) / around).mean()

    is_noun = slot < scenes.nouns.shape[1]
    owner, slot, row, column = owner[is_noun], slot[is_noun], row[is_noun], column[is_noun]
    loss = loss + 0.5 * F.cross_entropy(styles[owner, :, row, column], scenes.styles[owner, slot])
    color = scenes.colors[owner, slot]
    tinted = color >= 0
    hue = F.cross_entropy(colors[owner, :, row, column][tinted], color[tinted], reduction="sum")
    return loss + hue / tinted.sum().clamp(min=1)


def _area(sides: torch.Tensor) -> torch.Tensor:
    return (sides[:, 0] + sides[:, 2]) * (sides[:, 1] + sides[:, 3])


def main() -> None:
    train_and_measure(__doc__, train)


if __name__ == "__main__":
    main()
