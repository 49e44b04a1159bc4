"""Collectives on a ring of explicit messages, and what gradients travel as."""
