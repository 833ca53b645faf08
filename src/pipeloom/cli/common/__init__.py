"""What several commands have in common: their parser, options, files and standard streams."""
