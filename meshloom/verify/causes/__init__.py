"""Causes of wrong gradients, each with the gradients that it would give."""
