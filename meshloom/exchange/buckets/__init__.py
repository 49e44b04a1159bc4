"""Gradients in flat buckets, and how their mean is computed: exactly, or compressed."""
