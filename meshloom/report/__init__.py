"""Results of runs and plans as text, records and pictures."""
