"""A rank's actions carried out: forwards, backwards and messages."""
