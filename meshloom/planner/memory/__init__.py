"""The memory of a training step, predicted and measured."""
