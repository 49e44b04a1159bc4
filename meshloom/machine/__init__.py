"""What a machine does, as values: seconds of operators and of links between ranks."""
