"""Programs that save less for their backward and recompute it."""
