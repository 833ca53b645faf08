"""What a run leaves in its output directory and shows on the terminal."""
