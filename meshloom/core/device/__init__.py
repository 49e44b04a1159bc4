"""The host and its device: copies beside computation, and values that the host reads without stopping the device."""
