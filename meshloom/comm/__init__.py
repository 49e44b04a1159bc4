"""Groups of ranks: their contract, and what all transports share."""
