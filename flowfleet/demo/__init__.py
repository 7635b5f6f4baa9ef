"""`flowfleet demo`: a stack of its own, one job by REST, and what came of it as figures, pictures and a summary.

run.py         the demo from start to end
results.py     what is fetched from the finished job
statistics.py  figures: paired bootstrap, and how the pictures look apart from their words
plots.py       reward_curve.png and before_after.png
"""
