"""What `pipeloom plan` plans for, and its page."""
