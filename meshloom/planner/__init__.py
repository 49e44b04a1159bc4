"""What a plan would cost on a machine: seconds and bytes, measured once and predicted from the program."""
