"""Comparison of a plan with one device, tensor by tensor."""
