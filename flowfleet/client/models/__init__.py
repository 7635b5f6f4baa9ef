"""A finished model on its way elsewhere: merged into its base, uploaded to the Hugging Face Hub."""
