"""The checkpoints of a run: its own, and those of torch.distributed.checkpoint that it is resumed from."""
