"""Two judges of scenes: `reward`, which training sees, and `heldout`. They share renders and GenEval's rules, and in
the medium world the person who labeled what each learns from; no picture is in both."""
