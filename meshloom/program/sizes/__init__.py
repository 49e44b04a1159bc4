"""Programs for batches of other sizes than those that were read."""
