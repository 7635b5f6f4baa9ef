"""Parts of a training step: its request, batches, updates and metrics. objectives/ has what each loss trains on."""
