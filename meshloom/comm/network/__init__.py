"""Groups over several hosts: which ranks share a host, what they trust, and how far their clocks are
apart."""
