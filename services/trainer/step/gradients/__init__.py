"""Gradients of rewards by the clean latents of a step's samples: asked (client.py), kept (store.py), put together
(gradients.py)."""
