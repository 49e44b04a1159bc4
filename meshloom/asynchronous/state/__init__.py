"""What servers hold, what workers compute with, snapshots and checkpoints."""
