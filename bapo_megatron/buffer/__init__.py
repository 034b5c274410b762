"""From groups to a batch, and from a batch to the micro-batches of each rank. Start at `batch.BatchBuilder`."""
