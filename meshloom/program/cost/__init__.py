"""What a program costs: work, bytes, seconds, and what autograd saves."""
