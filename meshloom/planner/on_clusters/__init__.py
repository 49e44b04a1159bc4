"""What a plan takes on a cluster that is not here."""
