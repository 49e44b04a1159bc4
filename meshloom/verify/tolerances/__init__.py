"""Which differences between a plan and one device count as rounding."""
