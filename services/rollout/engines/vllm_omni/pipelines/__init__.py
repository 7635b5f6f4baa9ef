"""vLLM-Omni's transformers under our sampler, a file a family. Import the modules, not this package."""
