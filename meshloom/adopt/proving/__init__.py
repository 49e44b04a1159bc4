"""Whether a job does what the script was seen to do."""
