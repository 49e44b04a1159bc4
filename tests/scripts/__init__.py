"""Training scripts as people write them, and the jobs that they become; those that draw nothing at random
also have their own loop, for comparison."""
