"""Leaves: modules that stay the user's own code, each call of which is one operator of a program."""
