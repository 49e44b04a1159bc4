"""Ranks of one host that talk through memory which all of them have mapped."""
