"""Expert parallelism: packing tokens before, and planning rows after, the all-to-all between ranks."""
