"""What a configuration of a transformer costs on a cluster: seconds per kernel, stage and step, and bytes. No torch here."""
