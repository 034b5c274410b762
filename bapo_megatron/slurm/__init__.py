"""SLURM jobs: writing and submitting one, and what each of its nodes runs. Start at `submit.make_job`."""
