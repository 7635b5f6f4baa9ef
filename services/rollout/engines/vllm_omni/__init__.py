"""What runs inside vLLM-Omni for our engine, and that engine.

    launch           starts it
    engine, loop     the engine, and the event loop of its thread
    pipelines/       vLLM-Omni's transformers under our sampler: `registry` has which family is drawn by
                     which, `base` what they share
    task             what is asked of the engine's thread, and what came of it
    extension        the worker's side of loading, weight updates and sampling
    adapter          LoRA in vLLM-Omni's layers, from memory; compiled_lora: so that these can be compiled
    parameters       live parameters under the names that weights are published by
    plugin           chosen by vLLM-Omni at import: `platform` on CPUs, and slim imports
    platform, attention, slim_imports    what the CPU lacks of vLLM-Omni

One worker in this process: requests, tasks and results are passed by reference, nothing is pickled.
"""
