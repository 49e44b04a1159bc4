"""Job files of the first part of the fifth list, smaller ones. Each stands alone, as a user's does."""
