"""The number of rows in a chunk of logits. Plans read this too, so it does not import torch."""

LARGER_CHUNKS = (4096, 3072, 2048)
"""Rows that a plan chooses from: an update took 742 ms with 4096 rows and 754 ms with 1536 (docs/measured/gpu.toml)."""
_CPU_ROWS = 256
_GPU_BYTES = 1 << 30  # for float32 logits


def chunk_rows(vocab_rows: int, *, on_gpu: bool) -> int:
    """Return the number of rows whose logits exist together, if `train.logprob_chunk_tokens` is unset.

    On a GPU, chunks are large: each one reads and writes the gradient of all `vocab_rows` of this rank's weight.
    """
    fitting = _GPU_BYTES // (4 * vocab_rows) if on_gpu else _CPU_ROWS
    return max(1, fitting // _CPU_ROWS) * _CPU_ROWS
