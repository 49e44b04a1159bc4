"""What the loss of a batch computes, as a program."""
