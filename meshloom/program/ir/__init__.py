"""The captured loss as a value: nodes, programs, their bytes."""
