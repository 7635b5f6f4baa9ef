"""Writes a tiny model that understands and paints, with random weights, in a second and without the network.

    python -m recipes.tiny_unified bagel --output runs/tiny_bagel
    python -m recipes.tiny_unified hunyuan_image3 --output runs/tiny_hunyuan_image3

The folders have the layout that the authors publish. `hunyuan_image3_instruct` has the Instruct model's template.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from recipes.tiny_unified.bagel import make_tiny_bagel
from recipes.tiny_unified.hunyuan_image3 import make_tiny_hunyuan_image3, make_tiny_hunyuan_image3_instruct

MAKERS = {
    "bagel": make_tiny_bagel,
    "hunyuan_image3": make_tiny_hunyuan_image3,
    "hunyuan_image3_instruct": make_tiny_hunyuan_image3_instruct,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the folder of one of `MAKERS`."""
    parser = argparse.ArgumentParser(prog="recipes.tiny_unified", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=sorted(MAKERS))
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.output.exists():
        parser.error(f"--output {options.output} exists: remove it, or name another folder")
    print(MAKERS[options.model](options.output, seed=options.seed))


if __name__ == "__main__":
    main()
