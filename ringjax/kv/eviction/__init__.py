"""Caches that keep the tokens a policy chooses."""
