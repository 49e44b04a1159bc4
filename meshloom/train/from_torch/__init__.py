"""Resuming from checkpoints of torch.distributed.checkpoint."""
