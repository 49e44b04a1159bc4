"""What a loss function returns, and which losses a step computes, in turn."""
