"""What is legal: the rules that every schedule and every program has to keep, asked again after every pass."""
