"""What runs and plans come to, as text, records and pictures."""
