"""The benchmark of policies that write text, on a model of Qwen3-Omni's Thinker at its real width."""
