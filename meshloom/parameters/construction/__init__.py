"""How a model is built, recorded as the operators that make its tensors, and replayed for those that a rank holds."""
