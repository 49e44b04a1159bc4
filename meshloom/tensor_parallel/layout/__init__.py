"""What the dims of a program's values stand for, and which part of them ranks hold."""
