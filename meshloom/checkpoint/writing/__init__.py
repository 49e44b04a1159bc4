"""Writing checkpoints: from all ranks of a host at once, or from several hosts."""
