"""One micro-batch in one partition, and what surrounds it: values, modes, random numbers, buffers, devices."""
