"""The cluster as the controller sees it: a mirror of its pods, Services and Jobs."""
