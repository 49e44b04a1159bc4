"""Schedules as lists of actions: builders, checks, and their length on paper."""
