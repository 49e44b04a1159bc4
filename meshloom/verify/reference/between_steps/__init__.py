"""What one device does between steps, in the plainest manner: evaluations, and going to another place in the data."""
