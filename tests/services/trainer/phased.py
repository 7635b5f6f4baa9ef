"""`python -m tests.services.trainer.phased PHASE`: a rank that works in one phase for ever."""

import os
import sys
import time

from services.trainer.beats import Beats, Phase


def main() -> None:
    beats = Beats(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    beats.timeouts = beats.timeouts.model_copy(update={"hang_s": float(os.environ["HANG_S"])})
    beats.carry()
    with beats.phase(Phase(sys.argv[1])):
        while True:
            beats.beat()
            time.sleep(0.05)


if __name__ == "__main__":
    main()
