"""From a Python function to a graph of operators: torch.export, and what is made of its graph."""
