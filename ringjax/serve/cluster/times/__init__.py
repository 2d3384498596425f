"""Times of an instance's prefill and decode: measured, fitted, published."""
