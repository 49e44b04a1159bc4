"""What happens between steps, compared with one device: evaluations, checkpoints, resuming, the end of an epoch."""
