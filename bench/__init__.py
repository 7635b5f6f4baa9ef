"""Scripts behind every published figure: run them with `make bench`, or one with `python -m bench.<name>`.

What computes here waits for its threads as the services do.
"""

import os

from flowfleet.process.service import PATIENT_THREADS

os.environ.update(PATIENT_THREADS)  # before torch
