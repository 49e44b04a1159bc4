"""What a run reports, as plain values: progress, its summary, timelines, and the listener. `report` turns
them into text and pictures."""
