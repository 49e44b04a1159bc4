"""What a run writes of itself to its directory."""
