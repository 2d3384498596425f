"""Parts of a call, which pass layers one after another."""
