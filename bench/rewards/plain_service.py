"""A reward service that scores in its own process whatever the scorer: `python -m bench.rewards.plain_service`.

Flags are those of `services.reward`. `python` too runs in the service's process, so a function that crashes ends it.
"""

from __future__ import annotations

import sys

from services.reward.__main__ import main
from services.reward.scorers.python_function import PythonFunction

if __name__ == "__main__":
    PythonFunction.isolated = False
    sys.exit(main())
