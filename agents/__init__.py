"""Algorithms as pure functions: one file each, made by `agents.make(name, spec, **overrides)`."""

from agents.registry import config, make, module, names, register
from agents.types import Agent, Need, Phase, Plan, Policy, Stage

__all__ = ['Agent', 'Need', 'Phase', 'Plan', 'Policy', 'Stage', 'config', 'make', 'module', 'names', 'register']
