"""Expert parallelism: experts of a layer on different processes, to which tokens are sent."""
