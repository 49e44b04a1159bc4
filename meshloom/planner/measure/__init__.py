"""Measures the operators and collectives of a machine."""
