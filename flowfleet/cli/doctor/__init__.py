"""`flowfleet doctor`: what a stack needs of this machine, and what a controller and its rewards answer."""
