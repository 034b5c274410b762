"""Before a run: what it needs (memory, time, layouts), and whether this machine is fit for it."""
