"""Which rollout replicas, pools and rewards there are, and what each replica serves."""
