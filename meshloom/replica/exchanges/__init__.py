"""The exchange of one replica's gradients: opened as its plan says, of one loss or of several in turn; and of rows that a loss gathers."""
