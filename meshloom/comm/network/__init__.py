"""Groups over several hosts: which ranks share a host, what they trust, the offsets of their clocks."""
