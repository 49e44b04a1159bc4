"""Ranks on several hosts: who runs where, whom a rank believes, how far clocks are apart."""
