"""A model folder of Qwen-Image at its real size without weights, for jobs with `model.load_format = "dummy"`."""
