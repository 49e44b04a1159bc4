"""A step of the plan and the same step of one device, compared: tensors by name, chunks, outputs of modules."""
