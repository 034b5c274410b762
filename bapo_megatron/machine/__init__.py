"""What GPUs have, what runs need of them, and how long a job may take. Start at `memory.trainer_memory`."""
