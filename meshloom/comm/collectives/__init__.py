"""All-reduce spelled out on messages: ring, tree, halving, hierarchical."""
