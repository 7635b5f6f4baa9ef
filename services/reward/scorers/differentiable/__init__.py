"""What gradients flow through in scorers: image processors, picture quality, and a judge in this process."""
