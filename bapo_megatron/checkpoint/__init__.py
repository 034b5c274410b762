"""Checkpoints on disk, written by all ranks and read in any layout. Start at `store.CheckpointStore`."""
