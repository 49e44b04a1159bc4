"""Which way of computing every node is the cheapest together."""
