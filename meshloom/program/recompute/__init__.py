"""Programs that save less for their backward and compute it again."""
