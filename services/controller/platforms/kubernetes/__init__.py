"""Trainers as Jobs of Kubernetes; pools and rewards from the release's Services and pods."""
