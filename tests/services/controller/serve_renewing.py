"""Runs serve_idle, but checks certificates ten times per second."""

from __future__ import annotations

import sys

from services.controller.__main__ import main
from services.controller.api import server
from tests.services.controller.conftest import IdleRunner

if __name__ == "__main__":
    server.RENEW_EVERY_S = 0.1
    sys.exit(main(sys.argv[1:], IdleRunner))
