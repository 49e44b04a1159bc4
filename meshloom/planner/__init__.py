"""What a plan would cost on a machine: seconds and bytes, predicted from the program."""
