"""Recovers a job from failures: retries, lost blobs, trainers that hang or resume elsewhere."""
