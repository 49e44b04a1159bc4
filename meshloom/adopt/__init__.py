"""The lines of docs/loops.md, written into a script at the places that its first steps show."""
