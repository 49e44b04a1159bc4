"""Measurements on this machine: its speed, contention between ranks, and steps under plans."""
