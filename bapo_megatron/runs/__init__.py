"""The folder of a run: what it holds, who has it, and what its files say."""
