"""The lean HiRadix cache: a prefix tree over KV pages on the GPU, in host memory and in storage."""
