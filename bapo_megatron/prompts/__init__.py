"""Prompt sources (chains, reasoning-gym, JSONL) and the resumable stream over them."""
