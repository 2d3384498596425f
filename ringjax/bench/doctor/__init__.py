"""Checks of a machine: what it has, whether kernels are right, how fast it is.

`checkup.check_up` runs them; `python -m ringjax.launch.doctor` prints them.
"""
