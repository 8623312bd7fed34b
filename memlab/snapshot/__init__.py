"""Memory snapshots of torch's caching allocator, read without torch."""
