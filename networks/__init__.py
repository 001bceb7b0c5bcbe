"""Flax modules that agents share."""

from networks.encoders import observation_encoder
from networks.flow import VelocityField
from networks.mlp import MLP, EnsembleCritic

__all__ = ['MLP', 'EnsembleCritic', 'VelocityField', 'observation_encoder']
