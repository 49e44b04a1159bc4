"""Programs divided over the ranks of the tp axis."""
