"""Tasks with known answers, and the texts around them."""
