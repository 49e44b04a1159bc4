"""A loop of one's own on many devices: every rank runs the whole script, and `parallel()` makes its modules one model."""
