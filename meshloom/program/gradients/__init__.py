"""Tracing a loss together with the gradients that it takes itself."""
