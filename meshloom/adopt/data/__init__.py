"""What a job reads in place of a script's loader."""
