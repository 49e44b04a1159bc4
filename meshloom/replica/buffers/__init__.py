"""Buffers that training writes: every chunk reads them as the step found them, and writes are merged in the
chunks' order."""
