"""Prompt sources (chains, programs, reasoning-gym, JSONL) and the resumable stream over them."""
