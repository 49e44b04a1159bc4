"""The runtime of a rank: its forwards, backwards and messages."""
