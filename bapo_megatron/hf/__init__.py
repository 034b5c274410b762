"""Hugging Face checkpoint folders: what config.json means, reading and writing weights. Knows nothing of Megatron."""
