"""The axes of a program's values, and the placements that shard them."""
