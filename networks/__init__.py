"""Flax modules that agents share."""

from networks.encoders import observation_encoder
from networks.flow import VelocityField
from networks.mlp import MLP, EnsembleCritic
from networks.policy import GaussianPolicy

__all__ = ['MLP', 'EnsembleCritic', 'GaussianPolicy', 'VelocityField', 'observation_encoder']
