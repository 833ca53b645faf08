"""Training loops of other libraries that run on a pipeline. Each is imported from its own module, and imports them."""
