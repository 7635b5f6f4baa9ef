"""Scorers around networks: CLIP and its kin, detectors, libraries of others, the files that they are loaded from."""
