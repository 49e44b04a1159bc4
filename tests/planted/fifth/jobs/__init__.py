"""Job files of the second part of the fifth list. Each stands alone, as a user's does: tests copy it beside the edited package."""
