"""What a loss function returns."""
