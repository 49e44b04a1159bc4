"""What a plan will cost before it runs: memory."""
