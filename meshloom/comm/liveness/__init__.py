"""What other processes can know of a rank: what it does, and what it left to say."""
