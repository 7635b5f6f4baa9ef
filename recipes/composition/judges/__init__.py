"""Two judges of scenes that share nothing but GenEval's rules: `reward`, which training sees, and `heldout`."""
