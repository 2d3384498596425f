"""Simulated clusters, their workloads and times."""
