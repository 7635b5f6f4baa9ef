"""vLLM-Omni's engine, and our code that runs inside vLLM-Omni.

    launch           starts it
    engine, loop     the engine, and the event loop of its thread
    pipelines/       vLLM-Omni's transformers under our sampler: `registry` maps families to pipelines,
                     `base` has their common part
    task             a function for the engine's thread, and its result
    extension        the worker's side of loading, weight updates and sampling
    adapter          LoRA in vLLM-Omni's layers, from memory; compiled_lora: so that these can be compiled
    parameters       live parameters under the names that weights are published by
    plugin           chosen by vLLM-Omni at import: `platform` on CPUs, and slim imports
    platform, attention, slim_imports    stand in for parts that vLLM-Omni lacks on CPUs

One worker in this process: requests, tasks and results are passed by reference, nothing is pickled.
"""
