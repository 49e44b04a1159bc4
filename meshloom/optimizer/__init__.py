"""The one optimizer path."""
