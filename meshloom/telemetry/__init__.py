"""What a run tells as plain values: progress, the summary, timelines, and who listens. `report` turns them
into text and pictures."""
