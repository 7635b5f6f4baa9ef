"""Rewards: asked, judged by their answers, composed, tried at submit, compared with their successors."""
