"""The models of the matrix, by family."""
