"""`flowfleet doctor`: checks this machine for a stack, and what a controller and its rewards answer."""
