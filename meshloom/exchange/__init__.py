"""How replicas agree on gradients and parameters, in terms of what each rank owns."""
