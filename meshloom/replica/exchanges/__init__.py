"""The exchange of one replica's gradients: opened as its plan says; and of rows that a loss gathers."""
