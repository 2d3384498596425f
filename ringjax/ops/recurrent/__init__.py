"""Operations that carry a state along the sequence."""
