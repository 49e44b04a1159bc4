"""One device in a process of its own, beside rank 0's: what it compares with, and its verdict, travel as messages."""
