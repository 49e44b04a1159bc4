"""Schedules as lists of actions: builders, checks, and simulated timing."""
