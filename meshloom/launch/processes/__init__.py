"""Rank processes: started, watched, ended."""
