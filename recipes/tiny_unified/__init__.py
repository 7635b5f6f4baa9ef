"""Tiny BAGEL and HunyuanImage-3.0 with random weights: all runs on them, none of them can paint."""
