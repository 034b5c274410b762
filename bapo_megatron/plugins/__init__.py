"""BAPO inside other frameworks: one module for each, over the shared search of `algorithms/bound_search.py`.

A module here imports its host, torch and pydantic, and of this package the algorithms alone.
"""
