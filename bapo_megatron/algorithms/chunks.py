"""The number of rows in a chunk of logits. Plans read this too, so it does not import torch."""

CHUNK_STEP = 256  # rows: chunks on a GPU have a multiple of this many
MOST_CHUNK_ROWS = (
    4096  # that a plan chooses: an update took 742 ms with them, 754 ms with 1,536 (docs/measured/gpu.toml)
)
_GPU_BYTES = 1 << 30  # for float32 logits


def chunk_rows(vocab_rows: int, *, on_gpu: bool) -> int:
    """Return the number of rows whose logits exist together, if `train.logprob_chunk_tokens` is unset.

    On a GPU, chunks are large: each one reads and writes the gradient of all `vocab_rows` of this rank's weight.
    """
    fitting = _GPU_BYTES // (4 * vocab_rows) if on_gpu else CHUNK_STEP
    return max(1, fitting // CHUNK_STEP) * CHUNK_STEP
