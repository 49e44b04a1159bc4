"""Search for the cheapest division: a strategy for every node, a placement for every parameter."""
