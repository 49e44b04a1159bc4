"""What other processes can see of a rank: its current activity, and its note when it aborts."""
