"""One device that runs a plan's chunks as a plain loop, and what is noted of it; it imports nothing of
exchange, pipeline or the optimizer path."""
