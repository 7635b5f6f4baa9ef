"""`python -m tests.tiny_models KIND FOLDER` writes a random tiny checkpoint of a kind in `MAKERS`."""

import sys
from pathlib import Path

from tests.tiny_models import MAKERS, make_tiny

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MAKERS:
        sys.exit(f"usage: python -m tests.tiny_models KIND FOLDER, with KIND among {', '.join(MAKERS)}")
    make_tiny(sys.argv[1], Path(sys.argv[2]))
