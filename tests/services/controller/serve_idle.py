"""The controller's process with a runner that runs nothing: python -m tests.services.controller.serve_idle."""

from __future__ import annotations

import sys

from services.controller.__main__ import main
from tests.services.controller.conftest import IdleRunner

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], IdleRunner))
