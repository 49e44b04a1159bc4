"""What a script did in its first steps: recorded as it runs, and found again in its text."""
