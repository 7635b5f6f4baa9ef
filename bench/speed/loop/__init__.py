"""A whole job as services: `python -m bench.speed.loop`."""
