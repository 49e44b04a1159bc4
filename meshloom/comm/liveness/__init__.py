"""What other processes can see of a rank: its current activity, and the note that it leaves when it
aborts."""
