"""Messages between peers that come and go, over ZeroMQ."""
