"""Trainings beyond the next token: LoRA, CEPE, LongSpec, predictors."""
