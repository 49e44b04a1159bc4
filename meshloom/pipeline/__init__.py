"""Models cut into stages: schedules as lists of actions, their check, and their execution."""
