"""From an ordinary training script to a job: watched, rewritten, and proved equal."""
