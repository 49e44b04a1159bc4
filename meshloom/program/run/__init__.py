"""Programs on tensors."""
