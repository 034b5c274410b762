"""The folder of a run: what it holds, who holds its lock, and what its files say. Start at `folder.RunDir`."""
