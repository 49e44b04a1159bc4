"""A run as one page for a browser: `page.py` writes it, from what `history.py` reads."""
