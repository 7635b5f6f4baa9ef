"""Which weights a replica holds, whose they are, and how new ones come in."""
