"""The vLLM engine: vLLM's own `LLMEngine` in this process samples models that write text.

    launch         starts it, with its model on one device
    engine         the engine: requests share vLLM's batches, weights change while none runs
    sequences      requests of ours as requests of vLLM's, and what came of them
    log_probs      vLLM's sampler, with log-probs as the trainer defines them
    parameters     live parameters under the names that weights are published by
    adapter        LoRA in vLLM's layers, from memory
    cpu_kernels    vLLM's kernels for CPUs in torch, where its build has none

One worker in this process: tensors are passed by reference, nothing is pickled.
"""
