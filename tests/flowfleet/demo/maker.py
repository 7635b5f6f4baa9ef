"""Stands in for a module that makes a model: `python -m tests.flowfleet.demo.maker WHAT --output FOLDER`.

It copies the tiny model; with "fails" or "hangs" it stops halfway. "tells NAME" writes what the environment says of it.
"""

import os
import shutil
import sys
import time
from pathlib import Path

what, *more, _, output = sys.argv[1:]
print("transformer step 1 of 2", file=sys.stderr, flush=True)
model = Path(__file__).parents[3] / "recipes/tiny/model"
if what == "copies":
    shutil.copytree(model, output)
    print("\ntransformer step 2 of 2", file=sys.stderr)
elif what == "tells":
    Path(output).write_text(os.environ[more[0]])
else:
    shutil.copytree(model / "scheduler", Path(output) / "scheduler")
    print("half of it is written", file=sys.stderr, flush=True)
    if what == "hangs":
        time.sleep(600)
    raise ValueError("the atlas cannot be drawn")
