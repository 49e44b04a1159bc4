"""Models cut into stages, and their schedules."""
