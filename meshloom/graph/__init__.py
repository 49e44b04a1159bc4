"""Reading the model: what the loss of a batch computes, as a program."""
