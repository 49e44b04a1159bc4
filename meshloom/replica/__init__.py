"""One rank's training step."""
