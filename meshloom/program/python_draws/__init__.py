"""What `random`, numpy and `meshloom.step()` give a loss, as inputs of its programs."""
