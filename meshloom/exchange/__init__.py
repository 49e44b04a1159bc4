"""How replicas agree, in terms of what each rank owns."""
