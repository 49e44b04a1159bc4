"""What each operator does along the axes of its operands: one file per family of operators."""
