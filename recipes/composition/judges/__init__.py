"""Two judges of scenes: `reward`, which training sees, and `heldout`. They share renders and GenEval's rules alone."""
