"""Hugging Face checkpoint folders: supported families, the meaning of config.json, reading and writing weights.

A family is a file of `families/`. Start at `shape.model_shape`.
"""
