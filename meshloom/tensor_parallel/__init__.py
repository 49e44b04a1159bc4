"""Programs divided over the ranks of one axis."""
