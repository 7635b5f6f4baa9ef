"""What a judge does not say: how far pictures are from renders, how unlike a prompt's are, and where judges part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.composition.judges.networks.lite import Lite
from recipes.tiny.signs import Pixels

BATCH = 128


@torch.inference_mode()
def features(net: Lite, pictures: Pixels) -> torch.Tensor:
    """(N, channels) float64 on the CPU: means of the network's features over each picture (N, S, S, 3) uint8."""
    device = next(net.parameters()).device
    net.eval()
    parts = [
        torch.cat([level.mean((2, 3)) for level in net(part.to(device).float() / 255)], 1)
        for part in torch.split(torch.from_numpy(pictures).permute(0, 3, 1, 2), BATCH)
    ]
    return torch.cat(parts).double().cpu()


def frechet(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Fréchet distance of two sets of features (N, channels), each as a Gaussian (https://arxiv.org/abs/1706.08500): as
    FID, but of other features. It depends on how many pictures there are: compare equal numbers, of the same prompts.
    Raises ValueError for less than two."""
    if min(len(ours), len(theirs)) < 2:
        raise ValueError("a distance is of at least two pictures on either side")
    means, spreads = zip(*((each.mean(0), torch.cov(each.T)) for each in (ours, theirs)), strict=True)
    shared = torch.linalg.eigvals(spreads[0] @ spreads[1]).real.clamp(min=0).sqrt().sum()
    return float((means[0] - means[1]).square().sum() + spreads[0].trace() + spreads[1].trace() - 2 * shared)


def diversity(tries: Sequence[torch.Tensor]) -> float:
    """Mean distance of two pictures of one prompt. tries: features (prompts, channels) of one picture of each prompt.
    Raises ValueError for less than two."""
    if len(tries) < 2:
        raise ValueError("diversity is of at least two pictures of a prompt")
    pairs = [(one - other).norm(dim=1).mean() for place, one in enumerate(tries) for other in tries[:place]]
    return float(torch.stack(pairs).mean())


def parted(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of the prompts that one judge accepts and the other does not."""
    return sum(one != other for one, other in zip(ours, theirs, strict=True)) / len(ours)
