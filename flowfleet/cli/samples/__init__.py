"""`flowfleet samples`: pictures of a job on the command line and as a page."""
