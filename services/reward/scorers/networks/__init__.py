"""Scorers around networks: CLIP and its kin, detectors, the files that they are loaded from."""
