"""Speed of models that write text.

folder.py   a folder of Qwen3-Omni's Thinker at its real width, without weights
speed.py    rollout, update, gap of log-probs and weight update on one GPU
"""
