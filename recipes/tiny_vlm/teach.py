"""Teach a tiny Qwen2.5-VL to judge signs: is the word above the middle?

    python -m recipes.tiny_vlm.teach --output runs/tiny_judge

Supervised, on rendered signs, with the rubric's own question and the answer that the pixels give. Prints how often it
is right on signs that it has not seen. Equal seeds and threads give equal bytes on one machine.
"""

import argparse
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from recipes.tiny_vlm.lessons import draw_lesson, is_high
from recipes.tiny_vlm.model import TinyVlm, make_tiny_vlm
from services.reward.judge.rubrics import Rubric, load_rubric

RUBRIC = Path(__file__).with_name("high.toml")
ANSWERS = ("No", "Yes")
START_SCALE = 4.0
"""Scale of the untrained matrices: their std of 0.02 suits wide models but keeps a narrow model's attention flat for
long."""
WARM_UP = 20
NUM_TEST = 256

logger = logging.getLogger(__name__)


class Lessons:
    """Makes batches of one question about many signs, all of one length."""

    def __init__(self, vlm: TinyVlm, rubric: Rubric, seed: int) -> None:
        self._vlm = vlm
        self._rng = random.Random(seed)
        self._question = vlm.encode(conversation(rubric), [draw_lesson(random.Random(0))])["input_ids"]
        self._answers = torch.tensor([vlm.tokenizer(answer).input_ids for answer in ANSWERS])
        assert self._answers.shape == (len(ANSWERS), 1), "an answer is one token"

    def draw(self, size: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs of the forward with the right answers at their ends, and whether these are "Yes" (size,) int64."""
        return self.of([draw_lesson(self._rng) for _ in range(size)])

    def of(self, pictures: Sequence[Image.Image]) -> tuple[dict[str, Tensor], Tensor]:
        """The same of given signs."""
        media = self._vlm.image_processor(images=list(pictures), return_tensors="pt")
        truth = torch.tensor([int(is_high(np.asarray(picture))) for picture in pictures])
        ids = torch.cat([self._question.expand(len(pictures), -1), self._answers[truth]], dim=1)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == self._vlm.model.config.image_token_id).long(),
            **media,
        }
        return inputs, truth

    def targets(self, truth: Tensor) -> Tensor:
        """Returns the tokens that follow the question and the answer: the answer, and the end. (size, 2)."""
        ends = torch.full((len(truth), 1), self._vlm.tokenizer.eos_token_id)
        return torch.cat([self._answers[truth], ends], dim=1)

    def share_of_yes(self, logits: Tensor) -> Tensor:
        """P(Yes) / (P(Yes) + P(No)) of logits (size, vocabulary): (size,)."""
        return torch.softmax(logits[:, self._answers[:, 0]], dim=1)[:, 1]


def conversation(rubric: Rubric) -> list[dict[str, Any]]:
    """Returns the conversation that the scorer `vlm` sends for a rubric without slots of text."""
    parts = [
        {"type": "text", "text": value} if kind == "text" else {"type": "image_url"} for kind, value in rubric.pieces
    ]
    system = [{"role": "system", "content": rubric.system}] if rubric.system else []
    return [*system, {"role": "user", "content": parts}]


def teach(vlm: TinyVlm, lessons: Lessons, steps: int, batch_size: int, rate: float) -> None:
    """AdamW on the answer's tokens; the rate rises over the first steps and falls over the last half."""
    model = vlm.model.train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(START_SCALE if weight.ndim > 1 else 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP, 2.0 * (steps - step) / steps)
        inputs, truth = lessons.draw(batch_size)
        logits = model(**inputs, logits_to_keep=2).logits
        loss = cross_entropy(logits.flatten(0, 1), lessons.targets(truth).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            logger.info("step %d loss %.3f", step + 1, loss.item())
    model.eval()


@torch.inference_mode()
def accuracy(vlm: TinyVlm, inputs: dict[str, Tensor], truth: Tensor, lessons: Lessons) -> float:
    """Share of signs where the likelier of the two answers is right."""
    logits = vlm.model(**inputs, logits_to_keep=2).logits[:, 0]
    return float(((lessons.share_of_yes(logits) > 0.5) == truth.bool()).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        vlm = TinyVlm.load(make_tiny_vlm(folder, options.seed))
    rubric = load_rubric(str(RUBRIC))
    lessons = Lessons(vlm, rubric, options.seed)
    teach(vlm, lessons, options.steps, options.batch, options.rate)
    unseen = Lessons(vlm, rubric, options.seed + 1)
    logger.info("right on %.1f %% of %d unseen signs", 100 * accuracy(vlm, *unseen.draw(NUM_TEST), unseen), NUM_TEST)
    vlm.save(options.output)


if __name__ == "__main__":
    main()
