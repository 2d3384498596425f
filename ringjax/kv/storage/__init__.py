"""Arrays that hold keys and values: slots, ring buffers, pages."""
