"""Groups over torch.distributed, and shared memory as a backend of it."""
