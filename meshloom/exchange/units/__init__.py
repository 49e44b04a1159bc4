"""zero=3: parameters that every replica keeps a dp-th of, gathered where they are used."""
