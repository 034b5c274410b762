"""BAPO inside other frameworks: one module for each, on top of the shared search in `algorithms/bound_search.py`.

Start at `trl.BAPOTrainer`. A module here imports its host, torch and pydantic, and from this package only the
algorithms.
"""
