"""What forwards leave in plain attributes of modules for the next step (docs/buffers.md)."""
