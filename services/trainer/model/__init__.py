"""The model on its ranks: loaded, sharded, gathered; the adapter, and the policies besides the trained one."""
