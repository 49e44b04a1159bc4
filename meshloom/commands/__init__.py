"""What the verbs of the command line do, a file for each: only what a verb needs is imported."""
