"""What a server and a worker do."""
