"""Reading data: which rank reads which samples, and how many."""
