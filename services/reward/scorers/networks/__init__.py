"""Scorers around networks: CLIP and its kin, detectors, pyiqa's metrics, the files that they are loaded from."""
