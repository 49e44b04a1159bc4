"""Captured programs of a job: each is captured once and cached on disk for later runs."""
