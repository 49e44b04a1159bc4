"""Buffers that training writes: chunks read them as the step found them; writes are merged in their order."""
