"""Environments behind one contract. See `envs.make` for names and options, and `envs.types` for what an environment returns.

Importing this package loads no simulator and starts no JAX backend: each suite is imported when one of its names is first used.
"""

from envs.host import HostEnv, SlotEnv
from envs.registry import Name, make, names, parse, register, relabel

__all__ = ['HostEnv', 'Name', 'SlotEnv', 'make', 'names', 'parse', 'register', 'relabel']
