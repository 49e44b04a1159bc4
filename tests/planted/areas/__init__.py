"""The bugs, a file for each area."""
