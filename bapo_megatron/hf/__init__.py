"""Hugging Face checkpoint folders: supported families, the meaning of config.json, reading and writing weights.

Start at `families.Family`.
"""
