"""Modules as the user made them: compiled ones."""
