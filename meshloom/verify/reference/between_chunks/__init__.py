"""What one device does between the chunks of a step, where they are not independent of each other."""
