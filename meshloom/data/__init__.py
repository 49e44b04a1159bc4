"""Who reads which samples."""
