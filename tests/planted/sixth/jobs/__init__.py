"""Job files of the sixth list. Each stands alone, as a user's does: tests copy it beside the edited package."""
