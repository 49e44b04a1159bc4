"""Gradients in flat buckets, and how their mean is made: exactly, or compressed."""
