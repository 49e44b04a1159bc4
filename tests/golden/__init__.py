"""Exact values of today, in files that are read in a diff (`python -m tests.golden`)."""
