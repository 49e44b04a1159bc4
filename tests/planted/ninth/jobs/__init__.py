"""Job files of the ninth list. Each stands alone, as a user's does: tests copy it beside the edited package."""
