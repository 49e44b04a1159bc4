"""A few steps of a plan with all its ranks in this process, each with its own timing."""
