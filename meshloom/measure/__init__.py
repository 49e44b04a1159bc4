"""What is found out by running on this machine: what it does, and what plans take on it."""
