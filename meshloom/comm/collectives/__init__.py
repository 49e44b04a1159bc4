"""Collectives on explicit messages: ring, tree, halving, hierarchical."""
