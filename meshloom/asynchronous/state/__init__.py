"""What servers hold and workers compute with."""
