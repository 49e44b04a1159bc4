"""Measurements on this machine: its speed, and steps under plans."""
