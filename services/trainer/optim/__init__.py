"""AdamW on shards, where its moments are, and the scale of the loss in float16."""
