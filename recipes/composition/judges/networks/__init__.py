"""The networks of the two judges."""
