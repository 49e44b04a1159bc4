"""Groups of ranks of one host over memory that all of them map."""
